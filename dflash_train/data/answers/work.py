"""One regeneration in data terms: what each row of the mix is asked, what its answer is worth, and what stands in for
the rows that are lost."""

import dataclasses
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.config import DataConfig
from dflash_train.data.answers import rules
from dflash_train.data.answers.completions import Reply
from dflash_train.data.answers.journal import Journal
from dflash_train.data.answers.mix_rows import MixRows
from dflash_train.data.answers.rules import Prompt
from dflash_train.data.answers.windows import Limits, cut_middle, fit, limits_of
from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.records import Sample
from dflash_train.util.provenance import stable_hash


@dataclass
class Work:
    """The rows, the target's files (folder, config, tokenizer, spec) and the records that exist so far."""

    data: DataConfig
    rows: MixRows
    files: object
    renderer: Renderer
    journal: Journal
    parts: Path
    limits: Limits = field(init=False)

    def __post_init__(self):
        self.limits = limits_of(self.data.answers, self.files.hf_config.get_text_config().max_position_embeddings)

    @property
    def asked_rows(self) -> list[int]:
        """What is asked first: every train and held-out row."""
        return [*self.rows.rows["train"], *self.rows.rows["heldout"]]

    def prompt(self, row: int) -> Prompt | None:
        """The row as the target reads it, or None after noting why it cannot be asked."""
        sample = self.rows[row]
        try:
            token_ids, num_cut = fit(sample, self.renderer, self.limits)
        except RenderDrop as drop:
            self.journal.note(rules.no_answer(row, f"prompt_{drop.reason}"), None, 0)
            return None
        room, seed = self.limits.room(len(token_ids)), stable_hash(self.data.seed, "answer", sample.id) % 2**31
        sampling = rules.sampling_of(sample, self.data.answers, self.data.seed)
        return Prompt(row, array("i", token_ids), sampling, num_cut, room, seed)

    def prompts(self, rows: list[int]) -> Iterator[Prompt]:
        """Those of `rows` that have no record yet and can be asked, rendered one at a time."""
        for row in rows:
            if row not in self.journal and (prompt := self.prompt(row)) is not None:
                yield prompt

    # ------------------------------------------------------------ records

    def record(self, prompt: Prompt, token_ids: list[int], finish_reason: str, seed: int, **facts: object) -> dict:
        """The journal record of an answer, with the verdict on it."""
        if len(token_ids) > prompt.room:
            token_ids, finish_reason = token_ids[: prompt.room], "length"
        sample = self.rows[prompt.row]
        in_thought, limit = self.renderer.opens_thought[sample.thinking], self.data.answers.max_repetition
        dropped = rules.drop_reason(token_ids, finish_reason, self.files.tokenizer, limit, tools=sample.tools,
                                    in_thought=in_thought)  # fmt: skip
        return rules.record(prompt, token_ids, finish_reason, seed, dropped, **facts)

    def reply_record(self, prompt: Prompt, reply: Reply, server: str) -> dict:
        """The journal record of a server's answer; `server` names its version."""
        token_ids, facts = self.reply_ids(reply)
        return self.record(prompt, token_ids, reply.finish_reason, prompt.seed, server=server, **facts)

    def reply_ids(self, reply: Reply) -> tuple[list[int], dict]:
        """(the answer's ids, {"token_ids_from": "text"} where the server said only text).

        Some servers leave out the end token at which an answer stopped, in ids or in text; it belongs to the answer.
        """
        if reply.token_ids is None:
            ids, facts = self.files.tokenizer.encode(reply.text, add_special_tokens=False), {"token_ids_from": "text"}
        else:
            ids, facts = list(reply.token_ids), {}
        stops = self.files.spec.stop_ids
        if reply.finish_reason == "stop" and (not ids or ids[-1] not in stops):
            ids.append(reply.stop if reply.stop in stops else self.renderer.end_token_id)
        return ids, facts

    # ------------------------------------------------------------ waves

    def waves(self, answer: Callable[[list[int]], None]) -> list[int]:
        """Have every row answered, then stand-ins of the lost ones, then theirs. `answer` leaves a record of each row
        it is given. Returns the stand-ins.

        A wave is a function of the records of the waves before it alone, so that a run that is resumed asks the same.
        """
        reserve: dict[str, list[int]] = {}
        for row in self.rows.rows["reserve"]:
            reserve.setdefault(self.rows.sources[row], []).append(row)
        seen, wave, stand_ins = set(), self.asked_rows, []
        while wave:
            answer(wave)
            seen.update(wave)
            lost = lambda row: row in seen and row in self.journal.dropped
            stand_ins = rules.refill(lost, self.rows.rows["train"], reserve, self.rows.sources.__getitem__)
            wave = [row for row in stand_ins if row not in seen]
        return stand_ins

    def refilled(self, stand_ins: list[int]) -> dict[str, dict[str, int]]:
        """Train rows by source: lost, refilled from the reserve, not refilled."""
        count = lambda rows: Counter(self.rows.sources[row] for row in rows)
        lost = count(row for row in self.rows.rows["train"] if row in self.journal.dropped)
        filled = count(row for row in stand_ins if row not in self.journal.dropped)
        return {name: {"lost": lost[name], "refilled": filled[name], "not_refilled": lost[name] - filled[name]}
                for name in sorted(lost)}  # fmt: skip

    # ------------------------------------------------------------ the result

    def kept(self, rows: list[int], split: str, counts: rules.Counts) -> Iterator[Sample]:
        """The answered samples among `rows`, in their order, everything counted."""
        for row in rows:
            found = self.journal[row] if row in self.journal.places else None
            if found and "finish_reason" in found:
                counts.finish_reasons[found["finish_reason"]] += 1
            if reason := self.journal.dropped.get(row):
                counts.drop(self.rows.sources[row], reason)
                continue
            sample = dataclasses.replace(self.rows[row], split=split)
            if found["num_cut"]:
                upstream = {**sample.upstream, "messages_cut": found["num_cut"]}
                sample = dataclasses.replace(cut_middle(sample, found["num_cut"]), upstream=upstream)
            regen = rules.regen_record(self.files.spec, found)
            done = rules.answered(sample, regen, self.files.tokenizer, self.renderer.has_thinking_modes)
            counts.keep(done)
            yield done
