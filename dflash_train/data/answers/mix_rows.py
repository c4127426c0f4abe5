"""The mix's rows by number, without holding them: train rows, then held-out ones, then the reserve.

Memory holds an offset and a source a row; a row is read from its file when it is asked for.
"""

import json
from array import array
from pathlib import Path
from sys import intern

from dflash_train.records import Sample
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json

FILES = {"train": "prompts.jsonl", "heldout": "heldout.jsonl", "reserve": "reserve.jsonl"}
"""Split -> file, in the order of the row numbers. A mix without a reserve has no file of it."""


def heldout_ids(folder: Path) -> frozenset[str]:
    """The ids that the mix in `folder` holds out, by its manifest; none where answers were copied without their mix, or
    where an earlier version, whose mixes have no list, made it."""
    manifest = folder / "manifest.json"
    return frozenset(read_json(manifest).get("heldout_ids", ())) if manifest.exists() else frozenset()


class MixRows:
    """All rows of a mix folder. Raises UserError for a file that is cut, for an id that comes twice, and for one that
    is both held out and not: a held-out row must never be trained on."""

    def __init__(self, folder: Path):
        self.paths = {split: folder / name for split, name in FILES.items() if (folder / name).exists()}
        self.offsets, self.sources, self.rows = array("q"), [], {split: range(0) for split in FILES}
        self._files = {split: open(path, "rb") for split, path in self.paths.items()}  # noqa: SIM115 (close() below)
        numbers: dict[str, int] = {}
        for split in self._files:
            self._index(split, numbers)

    def _index(self, split: str, numbers: dict[str, int]) -> None:
        """Fill offsets, sources and rows; numbers: id -> row, of all files so far."""
        start, offset = len(self.offsets), 0
        for row, line in enumerate(self._files[split], start):
            self.rows[split] = range(start, row + 1)
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise UserError(self._place(row), got=f"not valid JSON ({error})",
                                fix="delete the mix and make it again") from None  # fmt: skip
            if (first := numbers.setdefault(fields["id"], row)) != row:
                self._refuse_twice(fields["id"], first, row)
            self.offsets.append(offset)
            self.sources.append(intern(fields["source"]))
            offset += len(line)

    def _refuse_twice(self, row_id: str, first: int, second: int) -> None:
        splits = {self.split(first), self.split(second)}
        got, want = "twice", "each id once"
        if len(splits) == 2 and "heldout" in splits:
            (other,) = splits - {"heldout"}
            got, want = f"held out, and also in {FILES[other]}", "held-out rows in heldout.jsonl alone"
        raise UserError(f"row {row_id}", got=f"{got}: {self._place(first)} and {self._place(second)}", want=want,
                        fix="delete the mix and make it again")  # fmt: skip

    def _place(self, row: int) -> str:
        split = self.split(row)
        return f"{self.paths[split]}:{row - self.rows[split].start + 1}"

    def __len__(self) -> int:
        return len(self.offsets)

    def split(self, row: int) -> str:
        return next(split for split, rows in self.rows.items() if row in rows)

    def __getitem__(self, row: int) -> Sample:
        file = self._files[self.split(row)]
        file.seek(self.offsets[row])
        return Sample.from_json(json.loads(file.readline()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
