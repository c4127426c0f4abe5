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
    """All rows of a mix folder. Raises UserError for a file that is cut, and for an id that is both held out and not:
    a held-out row must never be trained on."""

    def __init__(self, folder: Path):
        self.paths = {split: folder / name for split, name in FILES.items() if (folder / name).exists()}
        self.offsets, self.sources, self.rows = array("q"), [], {split: range(0) for split in FILES}
        self._files = {split: open(path, "rb") for split, path in self.paths.items()}  # noqa: SIM115 (close() below)
        ids: dict[str, set[str]] = {}
        for split in self._files:
            start = len(self.offsets)
            ids[split] = set(self._index(split))
            self.rows[split] = range(start, len(self.offsets))
        for split in ids.keys() - {"heldout"}:
            if both := sorted(ids[split] & ids["heldout"]):
                raise UserError(f"row {both[0]} of {folder}", got=f"held out, and also in {FILES[split]}",
                                want="held-out rows in heldout.jsonl alone",
                                fix="delete the mix and make it again")  # fmt: skip

    def _index(self, split: str):
        """Fill offsets and sources; yield the ids."""
        offset = 0
        for number, line in enumerate(self._files[split], 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{self.paths[split]}:{number}", got=f"not valid JSON ({error})",
                                fix="delete the mix and make it again") from None  # fmt: skip
            self.offsets.append(offset)
            self.sources.append(intern(row["source"]))
            offset += len(line)
            yield row["id"]

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
