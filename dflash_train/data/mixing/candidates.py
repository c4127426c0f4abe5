"""Raw rows that may be needed -> candidates: cleaned, cut to one prompt or all, with all that the choice between them
compares. A function of the rows alone, so chunks are prepared in any process.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.clean import Drop, clean_messages, normalized
from dflash_train.data.forms import RawRow
from dflash_train.data.mixing.decontaminate import Decontaminator
from dflash_train.data.mixing.near_duplicates import NUM_PERMUTATIONS, signature
from dflash_train.data.mixing.quality import poor
from dflash_train.data.mixing.sift import HASH_RANGE, Place, read_places, refuse_bad_row
from dflash_train.records import Sample
from dflash_train.util.io import json_line, read_json
from dflash_train.util.parallel import count
from dflash_train.util.provenance import stable_hash

_NUMBERED = re.compile(r"~\d+$")
HELDOUT_TASK = "heldout"  # the mix's own held-out rows, beside the evaluation sets


@dataclass(slots=True)
class Candidate:
    """A prompt of fitting length. conversation: the row it is cut from; keys: what exact deduplication compares;
    unique, kind: as in RawRow; contaminated: the task whose text it has; poor: why it is no text; near: its row among
    its bucket's signatures, -1 without one; offset, size: its canonical row's bytes in the source's spool."""

    source: str
    id: str
    conversation: str
    keys: tuple[bytes, ...]
    unique: str | None
    kind: str | None
    contaminated: str | None
    poor: str | None
    offset: int
    size: int
    near: int = -1


@dataclass(frozen=True)
class PrepareJob:
    """Rows of one source. places: (place, its number among rows of the same id); texts: file of evaluation texts."""

    name: str
    source: SourceConfig
    data: DataConfig
    spool: Path
    places: list[tuple[Place, int]]
    texts: Path


@dataclass
class Prepared:
    """rows = converted + dropped; prompts = candidates + filtered. lines: the candidates' canonical rows, each at its
    offset; signatures: u32 a candidate, or None where the bucket is not compared."""

    rows: int = 0
    converted: int = 0
    prompts: int = 0
    dropped: Counter = field(default_factory=Counter)
    repaired: Counter = field(default_factory=Counter)
    filtered: Counter = field(default_factory=Counter)
    candidates: list[Candidate] = field(default_factory=list)
    lines: bytes = b""
    signatures: np.ndarray | None = None

    def add(self, other: "Prepared") -> None:
        """Its counts too."""
        self.rows += other.rows
        self.converted += other.converted
        self.prompts += other.prompts
        for mine, more in ((self.dropped, other.dropped), (self.repaired, other.repaired)):
            mine.update(more)
        self.filtered.update(other.filtered)


def prepare(job: PrepareJob) -> Prepared:
    """Clean, cut, measure and describe each row. Raises UserError for a bad row with data.strict."""
    out, lines = Prepared(), bytearray()
    evaluation = decontaminator(job.texts)
    signatures = [] if job.source.bucket in job.data.near_duplicates.buckets else None
    for (_, number), raw in zip(job.places, read_places(job.spool, [place for place, _ in job.places]), strict=True):
        out.rows += 1
        repairs = set(raw.notes)
        try:
            messages = _clean(raw, repairs)
        except Drop as drop:
            refuse_bad_row(raw, drop.reason, job.data.strict)
            out.dropped[drop.reason] += 1
            continue
        out.converted += 1
        out.repaired.update(repairs)
        raw.id = unique_id(raw.id, number)
        for sample in prompts_of(job, raw, messages):
            out.prompts += 1
            if reason := length_reason(sample, job.data):
                out.filtered[reason] += 1
                continue
            line = json_line(sample.to_json()).encode("utf-8")
            candidate = _candidate(job.data, raw, messages, sample, evaluation)
            candidate.offset, candidate.size = len(lines), len(line)
            lines += line
            out.candidates.append(candidate)
            if signatures is not None:
                signatures.append(signature(asked_text(sample.messages)))
    if signatures is not None:
        out.signatures = np.array(signatures, dtype=np.uint32).reshape(-1, NUM_PERMUTATIONS)
    out.lines = bytes(lines)
    count(out.rows)
    return out


@lru_cache(maxsize=2)  # one for held-out rows, one for the others, in each process
def decontaminator(texts: Path) -> Decontaminator:
    """Of the texts in the file that the mixer wrote."""
    return Decontaminator(read_json(texts), long_only=(HELDOUT_TASK,))


def _clean(raw: RawRow, repairs: set[str]) -> list[dict]:
    try:
        return clean_messages(raw.messages, repairs)
    except RecursionError:
        raise Drop("nested_too_deep") from None


def unique_id(row_id: str, number: int) -> str:
    """Ids repeat in real sets, a sample's may not: the id and, from the second on, which of its rows this is. One that
    itself ends like that always gets its number, so that no two rows have one name."""
    return f"{row_id}~{number}" if number > 1 or _NUMBERED.search(row_id) else row_id


# ---------------------------------------------------------------- prompts


def prompt_ends(messages: list[dict]) -> list[int]:
    """Lengths of the prefixes that an assistant answers: each ends at a user turn or at the last of a run of tool
    results."""
    ends = []
    for index, message in enumerate(messages):
        following = messages[index + 1]["role"] if index + 1 < len(messages) else "assistant"
        if message["role"] in ("user", "tool") and following == "assistant":
            ends.append(index + 1)
    return ends


def prompts_of(job: PrepareJob, raw: RawRow, messages: list[dict]) -> list[Sample]:
    """One prompt of the conversation, at the turn its hash says, or one per turn with data.turns=all."""
    name, source, data = job.name, job.source, job.data
    ends = prompt_ends(messages)
    if data.turns != "all" and ends:
        ends = [ends[stable_hash(data.seed, "turn", name, raw.id) % len(ends)]]
    share = data.thinking_share.get(source.bucket, 0.0)
    # By conversation, so that all turns of one are answered in the same mode.
    hashed = "on" if stable_hash(data.seed, "thinking", name, raw.id) < share * HASH_RANGE else "off"
    return [
        Sample(
            id=f"{name}/{raw.id}" + (f"#{end}" if data.turns == "all" else ""),
            source=name,
            license=raw.license or source.license,
            bucket=source.bucket,
            split="train",
            thinking=raw.thinking or hashed,
            messages=messages[:end],
            tools=raw.tools,
            upstream=raw.upstream,
        )
        for end in ends
    ]


def length_reason(sample: Sample, data: DataConfig) -> str | None:
    """Characters of all messages outside data.min_prompt_chars .. max_prompt_chars (tokens are counted when
    rendering)."""
    length = sum(len(message["content"]) for message in sample.messages)
    return "too_short" if length < data.min_prompt_chars else "too_long" if length > data.max_prompt_chars else None


def _candidate(
    data: DataConfig, raw: RawRow, messages: list[dict], sample: Sample, evaluation: Decontaminator
) -> Candidate:
    texts = [message["content"] for message in sample.messages]
    return Candidate(
        source=sample.source,
        id=sample.id,
        conversation=f"{sample.source}/{raw.id}",
        # Both the whole conversation and the prompt cut out of it: copies may have been cut at different turns.
        keys=tuple(dict.fromkeys((dedupe_key(messages, sample.tools), dedupe_key(sample.messages, sample.tools)))),
        unique=raw.unique,
        kind=raw.kind,
        contaminated=next(filter(None, map(evaluation.hit, texts)), None),
        poor=next((reason for text in texts if (reason := poor(text, data.quality))), None),
        offset=0,
        size=0,
    )


def dedupe_key(messages: list[dict], tools: list[dict] | None) -> bytes:
    """128 bits of sha256 over the normalised system and user texts and the tool names."""
    texts = [normalized(message["content"]) for message in messages if message["role"] in ("system", "user")]
    names = sorted(tool["function"]["name"] for tool in tools or ())
    return sha256(json.dumps([texts, names]).encode("utf-8")).digest()[:16]


def asked_text(messages: list[dict]) -> str:
    """What near duplicates are compared by: the normalised system and user texts."""
    return normalized("\n".join(message["content"] for message in messages if message["role"] in ("system", "user")))
