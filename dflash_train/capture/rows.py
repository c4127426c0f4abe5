"""Every answered sample as the target reads it: rendered once per set of answers, then mapped, never held in memory.

    <work_dir>/rendered/<data>-<target>-<key>/
      token_ids.i32  loss_mask.u8   all rows one after the other, train rows first
      offsets.i64                   where each row starts, and the end of the last
      index.jsonl                   [sample id, source, content hash] a row
      facts.json                    rows a split, what was cut and dropped

The key names everything the rows follow from, so a resumed run and the workers of a host find them there.
"""

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_train.config import ExtractRun, TargetConfig
from dflash_train.data.answers.mix_rows import heldout_ids
from dflash_train.data.chat import Renderer
from dflash_train.data.rendering import Rows
from dflash_train.target.files import TargetFiles, load_tokenizer
from dflash_train.util.errors import UserError
from dflash_train.util.io import (
    atomic_folder,
    free_bytes,
    human_bytes,
    json_line,
    read_json,
    remove_unused,
    write_json,
)
from dflash_train.util.log import say
from dflash_train.util.parallel import Workers, num_cores
from dflash_train.util.provenance import canonical_json, code_version, digest, template_hash

SPLITS = {"train": "samples.jsonl", "heldout": "heldout.jsonl"}
CHUNK_BYTES = 8 << 20
"""Of an answers file that one job renders: some 600 long samples."""
JOBS_A_PROCESS = 4
"""Fewer are done sooner than another process has started."""
TOKEN_BYTES = 5
UNFINISHED_S, UNUSED_S = 24 * 3600, 30 * 24 * 3600
"""Rendered folders go when a killed run has left them unfinished, or no run has used them, for so long. Every commit of
this code makes new ones."""


class RenderedRows:
    """The rows of a rendered folder. Ids and masks of tokens are mapped; the index is read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = read_json(folder / "facts.json")
        self.num_cut, self.dropped, self.num_supervised = facts["num_cut"], facts["dropped"], facts["supervised"]
        self._counts, self._index = facts["rows"], None
        self.offsets = np.fromfile(folder / "offsets.i64", np.int64)
        self._token_ids, self._loss_mask = self._map("token_ids.i32", np.int32), self._map("loss_mask.u8", np.bool_)

    def _map(self, name: str, dtype) -> np.ndarray:
        path, want = self.folder / name, int(self.offsets[-1]) * np.dtype(dtype).itemsize
        got = path.stat().st_size
        if got != want or len(self.offsets) != len(self) + 1:
            raise UserError(str(path), got=f"{got} bytes", want=f"{want} bytes for {len(self):,} rows",
                            fix=f"delete {self.folder} and run extract again")  # fmt: skip
        return np.memmap(path, dtype, "r") if want else np.zeros(0, dtype)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def of(self, split: str) -> range:
        """The numbers of a split's rows."""
        return range(self._counts["train"]) if split == "train" else range(self._counts["train"], len(self))

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return int(self.offsets[row + 1] - self.offsets[row])

    def num_tokens(self, split: str) -> int:
        rows = self.of(split)
        return int(self.offsets[rows.stop] - self.offsets[rows.start])

    def token_ids(self, row: int) -> np.ndarray:
        """int32[n], a view of the file."""
        return self._token_ids[self.offsets[row] : self.offsets[row + 1]]

    def loss_mask(self, row: int) -> np.ndarray:
        """bool[n], a view of the file."""
        return self._loss_mask[self.offsets[row] : self.offsets[row + 1]]

    @property
    def sample_ids(self) -> list[str]:
        return self._columns()[0]

    @property
    def sources(self) -> list[str]:
        return self._columns()[1]

    @property
    def content_hashes(self) -> list[str]:
        return self._columns()[2]

    def _columns(self) -> list[list[str]]:
        if self._index is None:
            names: dict[str, str] = {}  # one string a source, not one a row
            with open(self.folder / "index.jsonl", encoding="utf-8") as file:
                rows = [(i, names.setdefault(source, source), h) for i, source, h in map(json.loads, file)]
            self._index = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], []]
        return self._index


# ---------------------------------------------------------------- rendering


@dataclass(frozen=True)
class RenderJob:
    """A piece of an answers file, whole lines from byte `start` to `stop`, and how to render it."""

    path: Path
    start: int
    stop: int
    split: str
    folder: Path
    target: TargetConfig
    mix_dir: Path
    max_tokens: int
    min_answer_tokens: int

    def __str__(self) -> str:
        return f"rendering {self.path}, bytes {self.start:,} to {self.stop:,}"


def rendered_rows(run: ExtractRun, files: TargetFiles, answers: list[str]) -> RenderedRows:
    """Every answered sample as the target reads it, cut to extract.max_tokens; rendered where it was not yet. answers:
    hashes of the answer files.

    Raises UserError where nothing is left to train on, for an id that comes twice, and for a held-out row among train
    rows.
    """
    folder = Path(run.work_dir, "rendered", f"{run.store_name}-{rows_key(run, files, answers)}")
    if not folder.is_dir():
        if removed := remove_unused(folder.parent, UNFINISHED_S, UNUSED_S):
            say(f"removed rendered samples that are long unused: {', '.join(removed)}")
        render_all(run, files, folder)
    os.utime(folder)  # it is in use
    rows = RenderedRows(folder)
    say(f"rendered {len(rows):,} samples; {rows.num_cut:,} cut to {run.extract.max_tokens:,} tokens; "
        f"{sum(rows.dropped.values()):,} dropped {rows.dropped or ''}")  # fmt: skip
    if not rows.of("train"):
        raise UserError(str(run.answers_dir), got="no sample with a supervised token", want="at least one")
    return rows


def rows_key(run: ExtractRun, files: TargetFiles, answers: list[str]) -> str:
    """Names everything the rows follow from, this code included: rows of another renderer are not taken for ours."""
    limits = [run.extract.max_tokens, run.data.answers.min_answer_tokens, sorted(heldout_ids(run.mix_dir))]
    return digest([answers, limits, files.spec.fingerprint, template_hash(files.tokenizer), code_version()], 12)


def render_all(run: ExtractRun, files: TargetFiles, folder: Path) -> None:
    """Fill `folder`: chunks are rendered in several processes and written in the order of the answers, so that the
    files are the same whatever the number of processes."""
    jobs = [job for split, name in SPLITS.items() for job in split_jobs(run, files, split, run.answers_dir / name)]
    _renderers.clear()
    _renderers[renderer_key(jobs[0].folder, run.target)] = Renderer(files.tokenizer)
    num_processes = min(run.data.num_processes or num_cores(), max(1, len(jobs) // JOBS_A_PROCESS))
    with atomic_folder(folder) as temporary, Workers(num_processes) as workers:
        try:
            write_rows(temporary, zip(jobs, workers.map(render, jobs, ahead=2), strict=True))
        except OSError as error:
            raise UserError(str(folder), got=f"{error.strerror or error} ({human_bytes(free_bytes(folder))} free)",
                            want=f"room for the rendered samples, {TOKEN_BYTES} bytes a token",
                            fix="free some space, or work_dir=<another folder>") from error  # fmt: skip


def split_jobs(run: ExtractRun, files: TargetFiles, split: str, path: Path) -> Iterator[RenderJob]:
    """Pieces of about CHUNK_BYTES, cut behind a line; one piece at least."""
    size, start = path.stat().st_size, 0
    with open(path, "rb") as file:
        while start < size or start == 0:
            file.seek(min(start + CHUNK_BYTES, size))
            file.readline()
            stop = file.tell()
            yield RenderJob(path, start, stop, split, files.folder, run.target, run.mix_dir, run.extract.max_tokens,
                            run.data.answers.min_answer_tokens)  # fmt: skip
            if stop >= size:
                return
            start = stop


def render(job: RenderJob) -> Rows:
    """The rows of one job."""
    key = renderer_key(job.folder, job.target)
    if key not in _renderers:
        _renderers[key] = Renderer(load_tokenizer(job.folder, job.target))
    rows = Rows(heldout_ids(job.mix_dir))
    rows.add(read_lines(job), job.split, _renderers[key], job.max_tokens, job.min_answer_tokens)
    return rows


_renderers: dict[str, Renderer] = {}


def renderer_key(folder: Path, target: TargetConfig) -> str:
    return canonical_json([str(folder), target.chat_template, target.template_hash, target.trust_remote_code])


def read_lines(job: RenderJob) -> Iterator[dict]:
    """The JSON objects of a job's lines. Raises UserError naming file and byte of a bad one."""
    with open(job.path, "rb") as file:
        file.seek(job.start)
        while (at := file.tell()) < job.stop:
            try:
                yield json.loads(file.readline())
            except ValueError as error:
                raise UserError(f"{job.path}, byte {at}", got=f"not valid JSON ({error})",
                                want="one object a line") from None  # fmt: skip


def write_rows(folder: Path, rendered: Iterator[tuple[RenderJob, Rows]]) -> None:
    """Append every job's rows to the files of `folder`, then the facts."""
    offsets, counts, supervised, num_cut = array("q", [0]), Counter(), Counter(), 0
    dropped: Counter = Counter()
    seen: set[str] = set()
    with (
        open(folder / "token_ids.i32", "wb") as ids_file,
        open(folder / "loss_mask.u8", "wb") as mask_file,
        open(folder / "index.jsonl", "w", encoding="utf-8") as index_file,
    ):
        for job, rows in rendered:
            for sample_id, row in rows.rows.items():
                if sample_id in seen:
                    raise UserError(f"sample {sample_id}", got="twice among the answers", want="each id once",
                                    fix="delete the answers and run regenerate again")  # fmt: skip
                seen.add(sample_id)
                row.token_ids.tofile(ids_file)
                row.loss_mask.tofile(mask_file)
                index_file.write(json_line([sample_id, row.source, row.content_hash]))
                offsets.append(offsets[-1] + len(row))
                counts[job.split] += 1
                supervised[job.split] += int(row.loss_mask.sum())
            dropped += rows.dropped
            num_cut += rows.num_cut
    (folder / "offsets.i64").write_bytes(offsets.tobytes())
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # the folder gets its name next, and must not outlive a power cut half empty
    each = lambda found: {split: found[split] for split in SPLITS}
    write_json(folder / "facts.json", {"rows": each(counts), "supervised": each(supervised), "num_cut": num_cut,
                                       "dropped": dict(dropped)})  # fmt: skip
