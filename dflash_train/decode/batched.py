"""The built-in generator of regeneration: batches that are a function of the rows, each whole on disk or absent.

Rows are rendered a window at a time, and batches are planned inside it. What is drawn in a batch depends on all of it,
so window and batch size stay the same as long as answers are unfinished (parts/identity.json holds them); greedy
answers depend on neither. A window whose rows all have records is not rendered again.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from dflash_train.data.answers.probes import Probe, probe_questions
from dflash_train.data.answers.rules import Batch, Prompt, plan_batches
from dflash_train.data.answers.work import Work
from dflash_train.target.base import TargetModel
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_jsonl
from dflash_train.util.log import Progress

WINDOW_BATCHES = 64  # of rows a window: enough to sort by length, seconds to render, little to hold
WINDOW_NUMBERS = 100  # batch numbers a window has: its full batches, and of each sampling one that is not full


class Batches:
    """load: called once, when something is to be answered. ready: called before that, once there is a target."""

    def __init__(self, work: Work, load: Callable[[], TargetModel], ready: Callable[["Batches"], None]):
        self.work, self.load, self.ready = work, load, ready
        self.target: TargetModel | None = None
        self.num_windows = 0

    def answer(self, rows: list[int]) -> None:
        """Answer and store, batch by batch, what is not stored yet; a share of n takes every n-th batch."""
        work, progress = self.work, None
        for batch in self._todo(rows):
            if self.target is None:
                self.target = self.load()
                self.ready(self)
            progress = progress or Progress("regenerate", self._num_left(rows), "answers")
            records = [
                work.record(prompt, token_ids, finish_reason, batch.seed)
                for prompt, (token_ids, finish_reason) in zip(batch.prompts, self.generate(batch), strict=True)
            ]
            path = work.parts / f"{batch.index:06d}.jsonl"
            write_jsonl(path, records)
            work.journal.scan(path)
            progress.update(len(records), tokens=sum(len(record["token_ids"]) for record in records))
        if progress:
            progress.close()

    def _todo(self, rows: list[int]) -> Iterator[Batch]:
        """This share's batches that are not stored yet, planned as they are needed."""
        work, answers = self.work, self.work.data.answers
        share, num_shares = answers.share()
        size = window_rows(answers.batch_size)
        for start in range(0, len(rows), size):
            window, first_index = rows[start : start + size], self.num_windows * WINDOW_NUMBERS
            self.num_windows += 1
            if all(row in work.journal for row in window):
                continue
            for batch in plan_batches(self._render(window), answers.batch_size, work.data.seed, first_index):
                mine = share_of(batch.index, num_shares) == share
                if mine and batch.prompts[0].row not in work.journal:
                    yield batch

    def _render(self, rows: list[int]) -> list[Prompt]:
        """The prompts of those that can be asked, whether answered or not: batches are planned with all of them."""
        progress, prompts = Progress("render", len(rows), "prompts"), []
        for row in rows:
            if (prompt := self.work.prompt(row)) is not None:
                prompts.append(prompt)
            progress.update()
        return prompts

    def _num_left(self, rows: list[int]) -> int:
        """Rows to answer yet; about, for a share, since it does not know what the others have done meanwhile."""
        share, num_shares = self.work.data.answers.share()
        journal = self.work.journal
        left = sum(row not in journal for row in rows)
        if num_shares == 1:
            return left
        own = sum(share_of(int(path.stem), num_shares) == share for path, _ in journal.places.values())
        return max(0, min(left, len(rows) // num_shares - own))

    def probe(self) -> list[Probe]:
        """The eight fixed questions, answered."""
        work = self.work
        asked = probe_questions(work.renderer, work.data.answers, work.limits, work.data.seed)
        samples = {prompt.row: sample for sample, prompt in asked}
        return [
            Probe(samples[prompt.row], prompt, *answer)
            for batch in plan_batches([prompt for _, prompt in asked], len(asked), work.data.seed)
            for prompt, answer in zip(batch.prompts, self.generate(batch), strict=True)
        ]

    def generate(self, batch: Batch) -> list[tuple[list[int], str]]:
        """(ids, "stop" | "length") a prompt. Raises UserError where the batch does not fit the GPU."""
        try:
            return self.target.answer([list(prompt.token_ids) for prompt in batch.prompts], seed=batch.seed,
                                      max_new_tokens=max(prompt.room for prompt in batch.prompts),
                                      **dataclasses.asdict(batch.sampling))  # fmt: skip
        except torch.OutOfMemoryError:
            raise UserError("data.answers.batch_size", got=f"{len(batch.prompts)}: the GPU's memory is too small",
                            want="a smaller batch", fix=f"data.answers.batch_size={max(1, len(batch.prompts) // 2)} "
                            "(finished batches belong to the old size: delete parts/)") from None  # fmt: skip


def window_rows(batch_size: int) -> int:
    return WINDOW_BATCHES * batch_size


def share_of(index: int, num_shares: int) -> int:
    """Which of num_shares has this batch. Window by window the dealing begins with another one, or the longest prompts
    would all be the same share's."""
    return sum(divmod(index, WINDOW_NUMBERS)) % num_shares
