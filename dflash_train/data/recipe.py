"""What a recipe asks for: the rows of each source, and how many of them."""

import importlib
from collections.abc import Callable

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data import SOURCES
from dflash_train.util.errors import UserError


def read_source(name: str, config: SourceConfig, data: DataConfig):
    """Iterator of RawRow over one source."""
    return importlib.import_module(SOURCES[config.kind]).read(name, config, data)


# ---------------------------------------------------------------- takes


def plan_takes(data: DataConfig, available: dict[str, int]) -> dict[str, int]:
    """Rows to take of each source. A source with fewer than its `take` (or none at all) is refused, unless
    data.allow_short: then the others of its bucket give more, in proportion to their own takes, as far as they have
    rows."""
    wants = {name: available[name] if source.take is None else source.take for name, source in data.sources.items()}
    empty = [name for name, source in data.sources.items() if available[name] == 0 and source.take != 0]
    short = {name: want for name, want in wants.items() if available[name] < want}
    if (empty or short) and not data.allow_short:
        names = list(dict.fromkeys([*short, *empty]))
        raise UserError(
            "data.sources",
            got="; ".join(f"{name} has {available[name]:,} rows after filters and hold-out" for name in names),
            want="; ".join(f"{wants[name]:,} of {name}" if name in short else f"rows of {name}" for name in names),
            fix=_smaller(data, wants, available, names),
        )
    takes = {name: min(want, available[name]) for name, want in wants.items()}
    for bucket in dict.fromkeys(source.bucket for source in data.sources.values()):
        members = [name for name, source in data.sources.items() if source.bucket == bucket]
        _spread(sum(wants[name] - takes[name] for name in members), members, wants, takes, available)
    total = sum(takes.values())
    if data.total is not None and total != data.total and not data.allow_short:
        raise UserError(
            "data.total",
            got=f"{total:,} rows from the sources' takes",
            want=f"{data.total:,}",
            fix=f"data.total={total}, or data.total=null",
        )
    return takes


def _smaller(data: DataConfig, wants: dict[str, int], available: dict[str, int], names: list[str]) -> str:
    """Overrides with which the recipe asks for no more than there is; as they are typed in a shell."""
    if any(data.sources[name].caps for name in names):  # a smaller take has smaller shares, and so fewer rows again
        return "data.allow_short=true"
    keys = [f"data.sources.{n}.take={available[n]}" if available[n] else f"'~data.sources.{n}'" for n in names]
    if data.total is not None:
        keys.append(f"data.total={sum(wants.values()) - sum(wants[name] - available[name] for name in names)}")
    return " ".join(keys) + ", or data.allow_short=true"


def _spread(
    deficit: int, members: list[str], wants: dict[str, int], takes: dict[str, int], available: dict[str, int]
) -> None:
    """Add `deficit` rows to `takes` of members that have spare rows, in proportion to wants (largest remainder
    first)."""
    spare: Callable[[str], int] = lambda name: available[name] - takes[name]
    while deficit > 0:
        givers = [name for name in members if spare(name) > 0 and wants[name] > 0]
        weight = sum(wants[name] for name in givers)
        if not givers:
            return
        shares = {name: deficit * wants[name] / weight for name in givers}
        gives = {name: min(int(share), spare(name)) for name, share in shares.items()}
        if not any(gives.values()):  # less than one row each: the largest remainder gets it
            gives = {max(givers, key=lambda name: (shares[name], -members.index(name))): 1}
        for name, count in gives.items():
            takes[name] += count
            deficit -= count
