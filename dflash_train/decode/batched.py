"""The built-in generator of regeneration: batches that are a function of the rows, each whole on disk or absent."""

import dataclasses
from collections.abc import Callable

import torch

from dflash_train.data.answers.probes import Probe, probe_questions
from dflash_train.data.answers.rules import Batch, plan_batches
from dflash_train.data.answers.work import Work
from dflash_train.target.base import TargetModel
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_jsonl
from dflash_train.util.log import Progress


class Batches:
    """load: called once, when something is to be answered. ready: called before that, once there is a target."""

    def __init__(self, work: Work, load: Callable[[], TargetModel], ready: Callable[["Batches"], None]):
        self.work, self.load, self.ready = work, load, ready
        self.target: TargetModel | None = None
        self.num_batches = 0

    def answer(self, rows: list[int]) -> None:
        """Answer and store, batch by batch, what is not stored yet; a share of n takes every n-th batch."""
        work, answers = self.work, self.work.data.answers
        share, num_shares = answers.share()
        prompts = [prompt for row in rows if (prompt := work.prompt(row)) is not None]
        batches = plan_batches(prompts, answers.batch_size, work.data.seed, self.num_batches)
        self.num_batches += len(batches)
        todo = [batch for batch in batches[share::num_shares] if batch.prompts[0].row not in work.journal]
        if not todo:
            return
        if self.target is None:
            self.target = self.load()
            self.ready(self)
        progress = Progress("regenerate", sum(len(batch.prompts) for batch in todo), "answers")
        for batch in todo:
            records = [
                work.record(prompt, token_ids, finish_reason, batch.seed)
                for prompt, (token_ids, finish_reason) in zip(batch.prompts, self.generate(batch), strict=True)
            ]
            path = work.parts / f"{batch.index:06d}.jsonl"
            write_jsonl(path, records)
            work.journal.scan(path)
            progress.update(len(records), tokens=sum(len(record["token_ids"]) for record in records))
        progress.close()

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
