"""Group data: sources, mixing, and how the target answers."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

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
    prompts_by: str | None = None  # the models that wrote the prompts, where some did; the data card says so
    bucket: str = "chat"
    take: int | None = None  # rows after filters; null = all
    caps: dict[str, float] = field(default_factory=dict)  # by kind of row: its largest share of the take
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SamplingConfig:
    """How the target answers in one thinking mode."""

    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20


@dataclass
class ClientConfig:
    """How the server named by data.answers.server is asked."""

    model: str | None = None  # null: the only one it serves
    key_env: str = "DFLASH_SERVER_KEY"  # variable with its key; not OPENAI_API_KEY: that is one server's
    concurrency: int = 128  # questions under way at once
    timeout_s: float = 900.0  # for one answer
    patience_s: float = 1800.0  # without one finished answer, after which the run stops
    retries: int = 8  # failures of one question, while the server answers others, after which it is dropped
    backoff_s: float = 0.5  # before the second try, doubled for each further one, with jitter
    compare: bool = False  # load the target here, too, and compare the server's greedy tokens with our own loop's


@dataclass
class AnswersConfig:
    """Regeneration: the target answers the mix. Lengths are in the target's tokens."""

    max_new_tokens: int = 4096
    batch_size: int = 64
    greedy_share: float = 0.1
    max_repetition: float = 0.5  # drop an answer in which more than this share of 8-grams repeats
    clip: int = 8192  # prompt and answer together
    answer_room: int = 1024  # a prompt has at most clip - answer_room tokens
    min_prompt_tokens: int = 8
    window_tokens: int = 6144  # agentic prompts are cut to this at message boundaries
    min_answer_tokens: int = 32  # where an answer is taken from the data, not written by the target
    probe: bool = True  # ask and check eight fixed questions before any other
    server: str | None = None  # http://host:port/v1 of an OpenAI-compatible server; null = the target is loaded here
    client: ClientConfig = field(default_factory=ClientConfig)
    accept_stale_mix: bool = False  # go on with answers although their mix is out of date (a source, the recipe)
    worker: str | None = None  # "i/n": only share i (from 0) of n; a last run without it refills and merges
    off: SamplingConfig = field(default_factory=SamplingConfig)
    on: SamplingConfig = field(default_factory=lambda: SamplingConfig(1.0, 0.95, 20))

    def check(self) -> None:
        key = "data.answers"
        require(0 < self.answer_room < self.clip, f"{key}.answer_room", got=self.answer_room, want="> 0 and < clip")
        require(self.window_tokens > 0, f"{key}.window_tokens", got=self.window_tokens, want="> 0")
        if self.worker is not None:
            self.share()
        if self.server is not None:
            url, client = urlsplit(self.server), self.client
            require(url.scheme in ("http", "https") and bool(url.hostname), f"{key}.server", got=self.server,
                    want="http://host:port/v1")  # fmt: skip
            require(url.username is None and not url.query, f"{key}.server", got="a URL with credentials or a query",
                    want="host and port only", fix=f"put the key into ${client.key_env}")  # fmt: skip
            require(client.concurrency > 0, f"{key}.client.concurrency", got=client.concurrency, want="> 0")
            require(client.retries >= 0, f"{key}.client.retries", got=client.retries, want=">= 0")
            require(0 < client.timeout_s <= client.patience_s, f"{key}.client.timeout_s", got=client.timeout_s,
                    want=f"> 0 and <= client.patience_s={client.patience_s:g}")  # fmt: skip

    def share(self) -> tuple[int, int]:
        """(i, n) of `worker`; (0, 1) without."""
        number, _, count = (self.worker or "0/1").partition("/")
        valid = number.isdecimal() and count.isdecimal() and int(number) < int(count)
        require(valid, "data.answers.worker", got=self.worker, want="i/n with 0 <= i < n, e.g. 0/4")
        return int(number), int(count)


@dataclass
class NearDuplicatesConfig:
    """Rows of these buckets whose 5-word shingles agree with an earlier row's to `threshold` (Jaccard) are dropped."""

    buckets: list[str] = field(default_factory=list)  # none = the filter is off
    threshold: float = 0.8


@dataclass
class QualityConfig:
    """Limits beyond which a message is no text; null = that limit is off."""

    repeated_lines: float | None = None  # share of lines that repeat an earlier one
    base64_bytes: int | None = None  # length of an unbroken run of base64


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
    reserve_fraction: float = 0.0  # of the take: spare rows for those that are lost when the target answers
    thinking_share: dict[str, float] = field(default_factory=dict)  # by bucket; absent = 0
    min_prompt_chars: int = 1
    max_prompt_chars: int = 100_000
    turns: str = "one"  # one | all assistant turns of a conversation
    decontaminate: list[str] = field(default_factory=lambda: ["humaneval", "gsm8k", "mtbench"])
    near_duplicates: NearDuplicatesConfig = field(default_factory=NearDuplicatesConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    num_processes: int | None = None  # that mix and render; null = one a core. Changes no byte of the result
    answers: AnswersConfig = field(default_factory=AnswersConfig)

    def check(self) -> None:
        require(bool(self.sources), "data.sources", got="{}", want="at least one source",
                fix="+data.sources.mine.path=my.jsonl")  # fmt: skip
        require(0 <= self.heldout_fraction < 1, "data.heldout_fraction", got=self.heldout_fraction, want="0 <= x < 1")
        require(0 <= self.reserve_fraction <= 1, "data.reserve_fraction", got=self.reserve_fraction, want="0..1")
        require(self.num_processes is None or self.num_processes > 0, "data.num_processes", got=self.num_processes,
                want="> 0 or null")  # fmt: skip
        threshold = self.near_duplicates.threshold
        require(0.5 <= threshold <= 1, "data.near_duplicates.threshold", got=threshold, want="0.5..1")
        require_choice(self.turns, ("one", "all"), "data.turns")
        for name, source in self.sources.items():
            key = f"data.sources.{name}"
            require(source.take is None or source.take >= 0, f"{key}.take", got=source.take, want=">= 0 or null")
            require(not source.caps or source.take is not None, f"{key}.caps", got=source.caps,
                    want="no caps where take is null: they are shares of it", fix=f"{key}.take=<rows>")  # fmt: skip
            for kind, share in source.caps.items():
                require(0 <= share <= 1, f"{key}.caps.{kind}", got=share, want="0..1")
            require(bool(source.path) or source.kind not in ("files", "hub"), f"{key}.path", got="nothing",
                    want="a file, folder or glob (kind files), or a data set id (kind hub)",
                    fix=f"{key}.path=my.jsonl")  # fmt: skip
        for bucket, share in self.thinking_share.items():
            require(0 <= share <= 1, f"data.thinking_share.{bucket}", got=share, want="0..1")
        answers = self.answers
        require(answers.max_new_tokens > 1, "data.answers.max_new_tokens", got=answers.max_new_tokens, want="> 1")
        require(answers.batch_size > 0, "data.answers.batch_size", got=answers.batch_size, want="> 0")
        answers.check()
