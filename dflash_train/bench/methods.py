"""The ways to decode that one evaluation measures side by side, and their names in tables."""

from dataclasses import dataclass, replace

from dflash_train.config import EvalConfig
from dflash_train.util.errors import UserError


@dataclass(frozen=True)
class Method:
    """One way to decode. kind: a key of PROPOSERS; the rest as in EvalConfig. `name` labels it."""

    kind: str
    budget: int = 64
    block_size: int | None = None
    ablate: str = "none"

    @property
    def name(self) -> str:
        name = f"{self.kind}-{self.budget}" if self.kind == "ddtree" else self.kind
        name += f" B={self.block_size}" if self.block_size else ""
        return name + {"none": "", "shuffle_features": ", shuffled rows", "untrained": ", untrained"}[self.ablate]


def method_of(config: EvalConfig) -> Method:
    """The method the configuration names."""
    if config.method == "autoregressive":
        return Method("autoregressive")
    return Method(config.method, config.budget, config.block_size, config.ablate)


def methods_of(config: EvalConfig) -> list[Method]:
    """All that is measured side by side: the baseline (a replay has none), the method, and eval.also; each once."""
    first = [Method("autoregressive")] if config.baseline and not config.replay else []
    return list(dict.fromkeys([*first, method_of(config), *(parse_method(config, text) for text in config.also)]))


def parse_method(config: EvalConfig, text: str) -> Method:
    """An entry of eval.also: "dflash", "ddtree:16", "dflash:untrained", "dflash:shuffle_features"."""
    kind, _, detail = text.partition(":")
    method = replace(method_of(config), kind=kind, ablate="none")
    chain = kind == "dflash" and detail in ("", "untrained", "shuffle_features")
    known = chain or (kind == "ddtree" and detail.isdigit() and int(detail) > 0)
    if not known or config.method == "autoregressive":
        raise UserError("eval.also", got=text if not known else f"{text} beside autoregressive, which loads no drafter",
                        want="dflash | dflash:untrained | dflash:shuffle_features | ddtree:<budget>")  # fmt: skip
    return replace(method, budget=int(detail)) if kind == "ddtree" else replace(method, ablate=detail or "none")
