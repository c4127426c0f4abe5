"""Train and measure DFlash drafters: mix -> regenerate -> extract -> train -> eval."""

__version__ = "0.1.0"
