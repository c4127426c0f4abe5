"""The one mixer: read every source, filter, deduplicate, hold out, take by hash order, shuffle. A pure function of its
inputs.

    read -> convert, clean -> prompts (one turn or all) -> ROW_FILTERS -> [spool on disk] -> SET_FILTERS -> hold out,
    take -> order

Sampling is without replacement: within a source rows stand in the order of sha256(seed|source|id) and the first `take`
are taken, so a smaller take is a prefix of a larger one. The lowest `heldout_fraction` of the hash range is set aside
before that. Rows wait in a temporary file; memory holds one small `Candidate` a row.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from pathlib import Path

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.clean import Drop, clean_messages, normalized
from dflash_train.data.decontaminate import Decontaminator
from dflash_train.data.forms import RawRow
from dflash_train.data.recipe import plan_takes, read_source
from dflash_train.records import Sample
from dflash_train.util.errors import UserError
from dflash_train.util.io import json_line
from dflash_train.util.provenance import stable_hash

HASH_RANGE = 2**64


@dataclass(slots=True)
class Candidate:
    """A prompt that passed the row filters. order: its place in the source's hash order; heldout: in the held-out
    range; keys: what exact deduplication compares; offset, size: its row's bytes in the source's spool."""

    source: str
    id: str
    order: int
    heldout: bool
    keys: tuple[bytes, ...]
    conversation: str
    offset: int
    size: int


@dataclass
class SourceReport:
    """What happened to a source's rows: read = converted + skipped + dropped, prompts = kept + filtered (with
    data.turns=one prompts = converted), and kept - taken - heldout rows were not asked for."""

    read: int = 0
    converted: int = 0
    skipped: Counter = field(default_factory=Counter)  # by the source's own rule: not chosen, but nothing wrong
    dropped: Counter = field(default_factory=Counter)
    repaired: Counter = field(default_factory=Counter)
    prompts: int = 0
    filtered: Counter = field(default_factory=Counter)
    duplicates: Counter = field(default_factory=Counter)  # by the source whose row was kept
    contaminated: Counter = field(default_factory=Counter)  # by evaluation task
    kept: int = 0
    heldout: int = 0
    taken: int = 0


@dataclass
class Mix:
    """The result: per-source reports, and the chosen candidates in final order, whose rows `rows` reads back."""

    reports: dict[str, SourceReport]
    train: list[Candidate]
    heldout: list[Candidate]
    spools: dict[str, Path]

    def rows(self, candidates: list[Candidate], split: str) -> Iterator[dict]:
        """The candidates' canonical rows, in their order, one read each."""
        files = {name: open(path, "rb") for name, path in self.spools.items()}  # noqa: SIM115 (closed below)
        try:
            for candidate in candidates:
                f = files[candidate.source]
                f.seek(candidate.offset)
                yield {**json.loads(f.read(candidate.size)), "split": split}
        finally:
            for f in files.values():
                f.close()


def build_mix(
    data: DataConfig,
    evaluation: dict[str, list[tuple[str, ...]]],
    workspace: Path,
    *,
    limit: int | None = None,
    on_row: Callable[[str], None] = lambda name: None,
    on_source: Callable[[str], None] = lambda name: None,
) -> Mix:
    """Mix the recipe's sources. evaluation: {task: [item texts]} that no row may contain; workspace: an empty folder
    for spools; limit: only the first rows of the final order; on_row, on_source: called for progress. Raises UserError
    for an unreadable, bad (strict) or short source."""
    reports = {name: SourceReport() for name in data.sources}
    row_filters = [LengthFilter(data), ContaminationFilter(evaluation)]
    candidates: list[Candidate] = []
    spools = {}
    for number, (name, source) in enumerate(data.sources.items()):
        spools[name] = workspace / f"{number}.jsonl"
        candidates += _collect(name, source, data, row_filters, spools[name], reports[name], on_row)
        on_source(name)
    for keep in SET_FILTERS:
        candidates = keep(candidates, reports)
    train, heldout = _choose(data, candidates, reports)
    final = lambda rows: sorted(rows, key=lambda c: (stable_hash(data.seed, "final", c.source, c.id), c.id))[:limit]
    return Mix(reports, final(train), final(heldout), spools)


# ---------------------------------------------------------------- reading one source


def _collect(
    name: str,
    source: SourceConfig,
    data: DataConfig,
    row_filters: list,
    spool: Path,
    report: SourceReport,
    on_row: Callable[[str], None],
) -> list[Candidate]:
    """Candidates of one source in hash order; their rows go to `spool`."""
    out: list[Candidate] = []
    seen_ids: Counter = Counter()
    with open(spool, "wb") as f:
        for raw in read_source(name, source, data):
            report.read += 1
            on_row(name)
            if raw.skip:
                report.skipped[raw.skip] += 1
                continue
            repairs = set(raw.notes)
            try:
                messages = _clean(raw, repairs)
            except Drop as drop:
                if data.strict:
                    raise UserError(
                        raw.location,
                        got=f"a row that cannot be used ({drop.reason})",
                        want="clean rows, since data.strict=true",
                        fix="data.strict=false counts it",
                    ) from None
                report.dropped[drop.reason] += 1
                continue
            report.converted += 1
            report.repaired.update(repairs)
            seen_ids[raw.id] += 1
            if seen_ids[raw.id] > 1:  # ids repeat in real sets; the sample's own id may not
                raw.id = f"{raw.id}~{seen_ids[raw.id]}"
            for sample in _prompts(name, source, data, raw, messages):
                report.prompts += 1
                reason = next((reason for check in row_filters if (reason := check(sample, report))), None)
                if reason:
                    report.filtered[reason] += 1
                    continue
                line = json_line(sample.to_json()).encode("utf-8")
                out.append(_candidate(data, name, raw, messages, sample, f.tell(), len(line)))
                f.write(line)
    out.sort(key=lambda candidate: (candidate.order, candidate.id))
    return out


def _clean(raw: RawRow, repairs: set[str]) -> list[dict]:
    if raw.drop:
        raise Drop(raw.drop)
    try:
        return clean_messages(raw.messages, repairs)
    except RecursionError:
        raise Drop("nested_too_deep") from None


def prompt_ends(messages: list[dict]) -> list[int]:
    """Lengths of the prefixes that an assistant answers: each ends at a user turn or at the last of a run of tool
    results."""
    ends = []
    for index, message in enumerate(messages):
        following = messages[index + 1]["role"] if index + 1 < len(messages) else "assistant"
        if message["role"] in ("user", "tool") and following == "assistant":
            ends.append(index + 1)
    return ends


def _prompts(name: str, source: SourceConfig, data: DataConfig, raw: RawRow, messages: list[dict]) -> Iterator[Sample]:
    """One prompt of the conversation, at the turn its hash says, or one per turn with data.turns=all."""
    ends = prompt_ends(messages)
    if not ends:
        return
    chosen = ends if data.turns == "all" else [ends[stable_hash(data.seed, "turn", name, raw.id) % len(ends)]]
    for end in chosen:
        sample_id = f"{name}/{raw.id}" + (f"#{end}" if data.turns == "all" else "")
        share = data.thinking_share.get(source.bucket, 0.0)
        # By conversation, so that all turns of one are answered in the same mode.
        hashed = "on" if stable_hash(data.seed, "thinking", name, raw.id) < share * HASH_RANGE else "off"
        yield Sample(
            id=sample_id,
            source=name,
            license=raw.license or source.license,
            bucket=source.bucket,
            split="train",
            thinking=raw.thinking or hashed,
            messages=messages[:end],
            tools=raw.tools,
            upstream=raw.upstream,
        )


def _candidate(
    data: DataConfig, name: str, raw: RawRow, messages: list[dict], sample: Sample, offset: int, size: int
) -> Candidate:
    group = stable_hash(data.seed, name, raw.group if raw.group is not None else raw.id)
    # Both the whole conversation and the prompt cut out of it: copies may have been cut at different turns.
    keys = tuple({dedupe_key(messages, sample.tools), dedupe_key(sample.messages, sample.tools)})
    return Candidate(
        name,
        sample.id,
        stable_hash(data.seed, name, raw.id),
        group < data.heldout_fraction * HASH_RANGE,
        keys,
        f"{name}/{raw.id}",
        offset,
        size,
    )


# ---------------------------------------------------------------- filters


class LengthFilter:
    """Characters of all messages between data.min_prompt_chars and data.max_prompt_chars (tokens are counted when
    rendering)."""

    def __init__(self, data: DataConfig):
        self.low, self.high = data.min_prompt_chars, data.max_prompt_chars

    def __call__(self, sample: Sample, report: SourceReport) -> str | None:
        length = sum(len(message["content"]) for message in sample.messages)
        return "too_short" if length < self.low else "too_long" if length > self.high else None


class ContaminationFilter:
    """No message of the prompt contains an evaluation item."""

    def __init__(self, evaluation: dict[str, list[tuple[str, ...]]]):
        self.decontaminator = Decontaminator(evaluation)

    def __call__(self, sample: Sample, report: SourceReport) -> str | None:
        for message in sample.messages:
            task = self.decontaminator.hit(message["content"])
            if task:
                report.contaminated[task] += 1
                return "contaminated"
        return None


def dedupe_key(messages: list[dict], tools: list[dict] | None) -> bytes:
    """128 bits of sha256 over the normalised system and user texts and the tool names."""
    texts = [normalized(message["content"]) for message in messages if message["role"] in ("system", "user")]
    names = sorted(tool["function"]["name"] for tool in tools or ())
    return sha256(json.dumps([texts, names]).encode("utf-8")).digest()[:16]


def exact_dedupe(candidates: list[Candidate], reports: dict[str, SourceReport]) -> list[Candidate]:
    """Of rows with a common key the first stays: the earliest source of the recipe, and within it the first in hash
    order. Held-out rows take part, so a train row never repeats a held-out one."""
    owner: dict[bytes, tuple[str, str]] = {}
    out = []
    for candidate in candidates:
        taken_by = next((owner[key] for key in candidate.keys if key in owner), None)
        if taken_by is not None and taken_by[1] != candidate.conversation:
            reports[candidate.source].filtered["duplicate"] += 1
            reports[candidate.source].duplicates[taken_by[0]] += 1
            continue
        for key in candidate.keys:
            owner.setdefault(key, (candidate.source, candidate.conversation))
        out.append(candidate)
    return out


# In order; each sees the candidates of all sources, by source and hash order, and returns those that stay.
SET_FILTERS: list[Callable[[list[Candidate], dict[str, SourceReport]], list[Candidate]]] = [exact_dedupe]


# ---------------------------------------------------------------- hold out and take


def _choose(
    data: DataConfig, candidates: list[Candidate], reports: dict[str, SourceReport]
) -> tuple[list[Candidate], list[Candidate]]:
    """(train, heldout). The held-out range of a large source may hold far more rows than its take asks for: as many as
    heldout_fraction of the take are kept, the rest of the range stays unused rather than trained on."""
    by_source: dict[str, list[Candidate]] = {name: [] for name in data.sources}
    for candidate in candidates:
        by_source[candidate.source].append(candidate)
        reports[candidate.source].kept += 1
    trainable = {name: [c for c in rows if not c.heldout] for name, rows in by_source.items()}
    takes = plan_takes(data, {name: len(rows) for name, rows in trainable.items()})
    train, heldout = [], []
    for name, rows in by_source.items():
        held = [candidate for candidate in rows if candidate.heldout][: ceil(data.heldout_fraction * takes[name])]
        train += trainable[name][: takes[name]]
        heldout += held
        reports[name].taken, reports[name].heldout = takes[name], len(held)
    return train, heldout
