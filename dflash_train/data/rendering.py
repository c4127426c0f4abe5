"""Answered samples as compact rows: rendered once, cut to a length, every loss counted."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.records import Sample
from dflash_train.util.errors import UserError


@dataclass(frozen=True)
class Row:
    """A rendered sample in 5 bytes a token: token_ids int32[n], loss_mask bool[n]."""

    split: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self.token_ids.tobytes() + self.loss_mask.tobytes()).hexdigest()[:16]


@dataclass
class Rows:
    """Sample id -> row, and what became of the rest."""

    heldout_ids: frozenset[str] = frozenset()  # of the mix: never a train row
    rows: dict[str, Row] = field(default_factory=dict)
    dropped: Counter = field(default_factory=Counter)
    num_cut: int = 0

    def add(self, samples: Iterable[dict], split: str, renderer: Renderer, max_tokens: int,
            min_answer_tokens: int = 1) -> None:  # fmt: skip
        """Render JSON samples of one split. An answer that came with the data, not from the target, must have
        min_answer_tokens. Raises UserError for an id that comes twice and for a held-out row among train rows."""
        for line in samples:
            sample = Sample.from_json(line)
            if split == "train" and (sample.split == "heldout" or sample.id in self.heldout_ids):
                raise UserError(f"sample {sample.id}", got="held out by the mix, and among the rows to train on",
                                want="held-out rows in heldout.jsonl alone",
                                fix="delete the answers and run regenerate again")  # fmt: skip
            try:
                rendered = renderer.render(sample)
            except RenderDrop as drop:
                self.dropped[drop.reason] += 1
                continue
            if not sample.regen and sum(rendered.loss_mask) < min_answer_tokens:
                self.dropped["short_answer"] += 1
                continue
            row = Row(split, np.array(rendered.token_ids[:max_tokens], np.int32),
                      np.array(rendered.loss_mask[:max_tokens], bool), sample.source)  # fmt: skip
            self.num_cut += len(rendered.token_ids) > max_tokens
            if not row.loss_mask.any():
                self.dropped["no_supervised_token_after_cut"] += 1
            elif sample.id in self.rows:
                raise UserError(f"sample {sample.id}", got="twice among the answers", want="each id once",
                                fix="delete the answers and run regenerate again")  # fmt: skip
            else:
                self.rows[sample.id] = row

    def of(self, split: str) -> dict[str, Row]:
        return {sample_id: row for sample_id, row in self.rows.items() if row.split == split}
