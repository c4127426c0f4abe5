"""Entry point for launchers: deepspeed [--num_gpus N] launch/train.py [key=value ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without an install

from dflash_train import cli
from dflash_train.train import main

if __name__ == "__main__":
    cli.main("train", main)
