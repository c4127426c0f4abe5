"""What a mix of the synthetic sources must be, told from the planted faults alone: no text is compared, cleaned or
searched (only the true Jaccard similarity of planted pairs is computed). It shares with the mixer the hash of an id,
the recipe, and the order in which filters are named."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import ceil

from mix_full_rows import BROKEN, Plan, changed, own_text, plan, raw_row

from dflash_train.config import DataConfig
from dflash_train.data.forms import row_id
from dflash_train.util.provenance import stable_hash

HASH_RANGE = 2**64
TEXT_FAULTS = ("repeated_lines", "base64")  # rows that convert, and are no text
AT_READING = "row_not_an_object"
NO_IDS = ("evol_code", "magicoder_oss", "codealpaca", "glaive_fc", "toolace")
Content = tuple[str, int]


@dataclass
class Expected:
    """Of one source: sample ids by split in hash order, counters, rows in hash order that can be looked at."""

    read: int = 0
    skipped: Counter = field(default_factory=Counter)
    dropped_at_reading: int = 0
    train: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)
    reserve: list[str] = field(default_factory=list)
    filtered: Counter = field(default_factory=Counter)
    contaminated: Counter = field(default_factory=Counter)
    near_dropped: set[str] = field(default_factory=set)
    queues: dict[bool, list] = field(default_factory=dict)  # held out? -> [(order, row, Plan, id)]


def expect(data: DataConfig) -> dict[str, Expected]:
    """The whole mix."""
    out = {name: _read(name, data) for name in data.sources}
    chosen = _Chosen(data)
    for name, source in data.sources.items():
        chosen.offer(name, out[name], out[name].queues[True], "heldout", ceil(data.heldout_fraction * source.take), 0)
    chosen.seal_heldout()
    for name, source in data.sources.items():
        reserve = ceil(data.reserve_fraction * source.take)
        chosen.offer(name, out[name], out[name].queues[False], "train", source.take, reserve)
    return out


def _read(name: str, data: DataConfig) -> Expected:
    """Every row's fate at reading, and the first rows in hash order, three times as many as can be needed."""
    source, out = data.sources[name], Expected()
    num_rows = source.options["rows"]
    share = (3 * source.take * (1 + data.reserve_fraction) + 600) / num_rows + data.heldout_fraction
    queues: dict[bool, list] = {True: [], False: []}
    for row in range(num_rows):
        what = plan(name, row, num_rows)
        out.read += 1
        if what.fault == AT_READING:
            out.dropped_at_reading += 1
        elif what.skip:
            out.skipped[what.skip] += 1
        else:
            id_, group = _id(name, row, what)
            order = stable_hash(data.seed, name, id_)
            held = (
                order if group is None else stable_hash(data.seed, name, group)
            ) < data.heldout_fraction * HASH_RANGE
            if held or order < share * HASH_RANGE:
                queues[held].append((order, row, what, id_))
    numbers: Counter = Counter()
    for entry in sorted(queues[True] + queues[False], key=lambda e: e[:2]):
        numbers[entry[3]] += 1
        number = numbers[entry[3]]
        held = entry in queues[True] if number > 1 else None
        if held is not None:
            queue = queues[held]
            queue[queue.index(entry)] = (*entry[:3], f"{entry[3]}~{number}")
    out.queues = {held: sorted(queue, key=lambda e: e[:2]) for held, queue in queues.items()}
    return out


def _id(name: str, row: int, what: Plan) -> tuple[str, str | None]:
    """(the row's own id, its group)."""
    if name in NO_IDS or what.fault == "copy" or name == "open_swe":
        raw = raw_row(name, row, what)
        return row_id(raw), raw.get("repo")
    raw = raw_row(name, row, Plan("empty_user", what.origin))  # cheap: ids do not depend on the text
    return row_id(raw), None


class _Chosen:
    """Everything that stays, by what it is made of."""

    def __init__(self, data: DataConfig):
        self.data = data
        self.texts: set[tuple] = set()
        self.questions: set[Content] = set()
        self.near: dict[str, set] = defaultdict(set)  # bucket -> contents and near rows that stay
        self.kinds: Counter = Counter()
        self.parts: set[Content] = set()  # whose 13-word runs a held-out row has

    def seal_heldout(self) -> None:
        self.heldout_parts, self.parts = self.parts, set()

    def offer(self, name: str, out: Expected, queue: list, split: str, num: int, num_reserve: int) -> None:
        rows, behind = (out.heldout, []) if split == "heldout" else (out.train, out.reserve)
        for _, row, what, id_ in queue:
            if len(rows) + len(behind) >= num + num_reserve:
                return
            if what.fault in BROKEN and what.fault not in TEXT_FAULTS:
                continue  # dropped in cleaning
            room = num if len(rows) < num else num + num_reserve
            reason = self._reason(name, row, what, id_, split, room)
            if reason is None:
                (rows if len(rows) < num else behind).append(f"{name}/{id_}")
                self._keep(name, row, what, id_, split)
                continue
            out.filtered[reason.partition(":")[0]] += 1
            if reason.startswith("contaminated"):
                out.contaminated[reason.partition(":")[2]] += 1
            if reason == "near_duplicate":
                out.near_dropped.add(f"{name}/{id_}")

    def _content(self, name: str, row: int, what: Plan) -> Content:
        return what.origin if what.fault in ("duplicate", "copy", "asked_again") else (name, row)

    def _key(self, name: str, row: int, what: Plan) -> tuple:
        return (*self._content(name, row, what), row if what.fault == "asked_again" else None)

    def _parts(self, name: str, row: int, what: Plan) -> set[Content]:
        return {self._content(name, row, what), what.origin}

    def _reason(self, name: str, row: int, what: Plan, id_: str, split: str, room: int) -> str | None:
        content, source = self._content(name, row, what), self.data.sources[name]
        if self._key(name, row, what) in self.texts:
            return "duplicate"
        if name == "openorca" and content in self.questions:
            return "same_question"
        kind = id_.partition(".")[0]
        if split == "train" and kind in source.caps and self.kinds[kind] + 1 > source.caps[kind] * room:
            return "over_cap"
        if source.bucket in self.data.near_duplicates.buckets and self._is_near(content, what, source.bucket):
            return "near_duplicate"
        if what.fault == "item":
            return "contaminated:items"
        if split == "train" and self._parts(name, row, what) & self.heldout_parts:
            return "contaminated:heldout"
        return what.fault if what.fault in TEXT_FAULTS else None

    def _is_near(self, content: Content, what: Plan, bucket: str) -> bool:
        """Its origin stays already, or the changed row of which it is the origin."""
        kept = self.near[bucket]
        if what.fault == "near":
            return what.origin in kept and true_jaccard(content, what) >= self.data.near_duplicates.threshold
        return ("changed", content) in kept

    def _keep(self, name: str, row: int, what: Plan, id_: str, split: str) -> None:
        content, bucket = self._content(name, row, what), self.data.sources[name].bucket
        self.texts.add(self._key(name, row, what))
        self.parts |= self._parts(name, row, what)
        if name == "openorca":
            self.questions.add(content)
        if split == "train":
            self.kinds[id_.partition(".")[0]] += name == "openorca"
        self.near[bucket].add(content)
        if what.fault == "near" and true_jaccard(content, what) >= self.data.near_duplicates.threshold:
            self.near[bucket].add(("changed", what.origin))


def true_jaccard(content: Content, what: Plan) -> float:
    """Of a changed row and its origin."""
    runs = lambda text: {tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)}
    before = own_text(*what.origin)
    a, b = runs(before), runs(changed(before, content[1], what.jaccard))
    return len(a & b) / len(a | b)
