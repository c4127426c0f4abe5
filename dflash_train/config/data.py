"""Group data: sources, mixing, and how the target answers."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dflash_train.config.checks import require, require_choice


@dataclass
class SourceConfig:
    """One source of the mix. kind: how it is reached (a key of data.SOURCES); form: what its rows look like."""

    kind: str = "files"
    path: str | None = None  # file, folder or glob (files); data set id (hub)
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    form: str = "auto"  # a form of data/forms.py; `mix` refuses others, so that a recipe loads before its forms exist
    license: str = "unknown"
    bucket: str = "chat"
    take: int | None = None  # rows after filters; null = all
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SamplingConfig:
    """How the target answers in one thinking mode."""

    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20


@dataclass
class AnswersConfig:
    """Regeneration: the target answers the mix."""

    max_new_tokens: int = 4096
    batch_size: int = 64
    greedy_share: float = 0.1
    max_repetition: float = 0.5  # drop an answer in which more than this share of 8-grams repeats
    off: SamplingConfig = field(default_factory=SamplingConfig)
    on: SamplingConfig = field(default_factory=lambda: SamplingConfig(1.0, 0.95, 20))


@dataclass
class DataConfig:
    """A recipe: data_recipes/<name>.yaml."""

    name: str = MISSING
    seed: int = 0
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    total: int | None = None  # refuse a mix of another size, unless allow_short
    allow_short: bool = False
    strict: bool = False  # stop at the first bad row instead of counting it
    heldout_fraction: float = 0.005  # per source, by stable hash, before anything is taken
    thinking_share: dict[str, float] = field(default_factory=dict)  # by bucket; absent = 0
    min_prompt_chars: int = 1
    max_prompt_chars: int = 100_000
    turns: str = "one"  # one | all assistant turns of a conversation
    decontaminate: list[str] = field(default_factory=lambda: ["humaneval", "gsm8k", "mtbench"])
    answers: AnswersConfig = field(default_factory=AnswersConfig)

    def check(self) -> None:
        require(bool(self.sources), "data.sources", got="{}", want="at least one source",
                fix="+data.sources.mine.path=my.jsonl")  # fmt: skip
        require(0 <= self.heldout_fraction < 1, "data.heldout_fraction", got=self.heldout_fraction, want="0 <= x < 1")
        require_choice(self.turns, ("one", "all"), "data.turns")
        for name, source in self.sources.items():
            key = f"data.sources.{name}"
            require(source.take is None or source.take >= 0, f"{key}.take", got=source.take, want=">= 0 or null")
            require(bool(source.path) or source.kind not in ("files", "hub"), f"{key}.path", got="nothing",
                    want="a file, folder or glob (kind files), or a data set id (kind hub)",
                    fix=f"{key}.path=my.jsonl")  # fmt: skip
        for bucket, share in self.thinking_share.items():
            require(0 <= share <= 1, f"data.thinking_share.{bucket}", got=share, want="0..1")
        answers = self.answers
        require(answers.max_new_tokens > 1, "data.answers.max_new_tokens", got=answers.max_new_tokens, want="> 1")
        require(answers.batch_size > 0, "data.answers.batch_size", got=answers.batch_size, want="> 0")
