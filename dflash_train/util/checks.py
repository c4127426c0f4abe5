"""One need of a stage, found or not: what the tables before every stage are made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One need: fix says what to type when it is not met."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
