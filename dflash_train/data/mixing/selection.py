"""Which candidates are in the mix: each is offered once, held-out rows of all sources first, then sources in the
recipe's order and rows in hash order, and stays unless a filter names a reason.

Only rows that stay claim anything (a text, a question, a share of their kind, a neighbourhood of near duplicates), and
a source's rows are offered until it has what the mix needs of it. So the result does not depend on how many more rows
were read or prepared than were needed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_train.config import DataConfig
from dflash_train.data.mixing.candidates import Candidate
from dflash_train.data.mixing.near_duplicates import NearIndex


@dataclass
class Outcome:
    """What became of one source's candidates: offered = rows + filtered."""

    heldout: list[Candidate] = field(default_factory=list)
    train: list[Candidate] = field(default_factory=list)
    reserve: list[Candidate] = field(default_factory=list)
    filtered: Counter = field(default_factory=Counter)
    duplicates: Counter = field(default_factory=Counter)  # by the source whose row stayed
    near_duplicates: Counter = field(default_factory=Counter)  # the same
    contaminated: Counter = field(default_factory=Counter)  # by evaluation task


class Selection:
    """The rows that stayed so far. near: by bucket, an index of the candidates that have signatures."""

    def __init__(self, data: DataConfig, near: dict[str, NearIndex]):
        self.data, self.near = data, near
        self.outcomes = {name: Outcome() for name in data.sources}
        self.texts: dict[bytes, Candidate] = {}
        self.questions: dict[tuple[str, str], str] = {}
        self.kinds: Counter = Counter()  # train and reserve rows by (source, kind)

    def hold_out(self, candidates: list[Candidate], num: int) -> None:
        """Offer held-out candidates of one source until `num` stay."""
        for candidate in candidates:
            rows = self.outcomes[candidate.source].heldout
            if len(rows) >= num:
                return
            if self._stays(candidate, FILTERS_WITHOUT_CAPS, 0):
                rows.append(candidate)

    def take(self, candidates: list[Candidate], num: int, num_reserve: int) -> None:
        """Offer one source's candidates until `num` stay for training and `num_reserve` behind them as reserve."""
        for candidate in candidates:
            outcome = self.outcomes[candidate.source]
            rows, room = (outcome.train, num) if len(outcome.train) < num else (outcome.reserve, num + num_reserve)
            if len(outcome.train) + len(outcome.reserve) >= num + num_reserve:
                return
            if self._stays(candidate, FILTERS, room):
                self.kinds[candidate.source, candidate.kind] += 1
                rows.append(candidate)

    def _stays(self, candidate: Candidate, filters: dict[str, Callable], room: int) -> bool:
        for reason, fails in filters.items():
            if fails(self, candidate, room):
                reason = candidate.poor if reason == "poor" else reason
                self.outcomes[candidate.source].filtered[reason] += 1
                return False
        for key in candidate.keys:
            self.texts.setdefault(key, candidate)
        if candidate.unique is not None:
            self.questions.setdefault((candidate.source, candidate.unique), candidate.conversation)
        if candidate.near >= 0:
            self._near_index(candidate).keep(candidate.near)
        return True

    def _near_index(self, candidate: Candidate) -> NearIndex:
        return self.near[self.data.sources[candidate.source].bucket]


# ---------------------------------------------------------------- filters: (selection, candidate, room) -> drop it?


def duplicate(selection: Selection, candidate: Candidate, room: int) -> bool:
    """A row that stayed has the same system and user texts and tools; turns of one conversation share theirs."""
    owners = (selection.texts[key] for key in candidate.keys if key in selection.texts)
    owner = next((owner for owner in owners if owner.conversation != candidate.conversation), None)
    if owner is not None:
        selection.outcomes[candidate.source].duplicates[owner.source] += 1
    return owner is not None


def same_question(selection: Selection, candidate: Candidate, room: int) -> bool:
    """The source's own key of the question is one that stayed, under another id."""
    asked = candidate.unique is not None and selection.questions.get((candidate.source, candidate.unique))
    return bool(asked) and asked != candidate.conversation


def over_cap(selection: Selection, candidate: Candidate, room: int) -> bool:
    """The row's kind has its share of the source's rows already."""
    cap = selection.data.sources[candidate.source].caps.get(candidate.kind or "")
    return cap is not None and selection.kinds[candidate.source, candidate.kind] + 1 > cap * room


def near_duplicate(selection: Selection, candidate: Candidate, room: int) -> bool:
    """A row of the same bucket that stayed is nearly the same text."""
    if candidate.near < 0:
        return False
    index = selection._near_index(candidate)
    found = index.find(candidate.near)
    if found is not None:
        source = index.owners[found].partition("/")[0]
        selection.outcomes[candidate.source].near_duplicates[source] += 1
    return found is not None


def contaminated(selection: Selection, candidate: Candidate, room: int) -> bool:
    """It contains an evaluation item, or (train rows) a held-out row's text."""
    if candidate.contaminated:
        selection.outcomes[candidate.source].contaminated[candidate.contaminated] += 1
    return bool(candidate.contaminated)


# In order; the first that fails is the reason that is counted. "poor" counts by what is poor about the text.
FILTERS: dict[str, Callable[[Selection, Candidate, int], bool]] = {
    "duplicate": duplicate,
    "same_question": same_question,
    "over_cap": over_cap,
    "near_duplicate": near_duplicate,
    "contaminated": contaminated,
    "poor": lambda selection, candidate, room: candidate.poor is not None,
}
FILTERS_WITHOUT_CAPS = {reason: fails for reason, fails in FILTERS.items() if reason != "over_cap"}
