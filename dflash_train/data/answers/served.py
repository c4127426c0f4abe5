"""Answers from a server, as records in the journal."""

from collections.abc import Callable
from itertools import chain

from dflash_train.data.answers.completions import NoReply, Reply
from dflash_train.data.answers.journal import Writer, share_name
from dflash_train.data.answers.probes import Probe, probe_questions
from dflash_train.data.answers.rules import Prompt, no_answer
from dflash_train.data.answers.server import Server
from dflash_train.data.answers.work import Work
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_json
from dflash_train.util.log import Progress, say
from dflash_train.util.provenance import digest


class Served:
    """Asks a server that has said who it is (`Server.describe`). ready: called once, before the first question;
    server_id: names model and version in every record."""

    def __init__(self, work: Work, server: Server, ready: Callable[["Served"], None]):
        self.work, self.server, self.ready, self.server_id = work, server, ready, digest(server.facts, 8)
        self.is_ready = False
        longest = server.facts.get("max_model_len")
        if longest is not None and longest < work.limits.context:
            raise UserError("data.answers.clip", got=f"{work.limits.context} tokens of prompt and answer; "
                            f"{server.url} takes {longest}", want="a server that takes what the rows may have",
                            fix=f"start it with a larger context, or data.answers.clip={longest}")  # fmt: skip
        write_json(work.parts / f"server-{self.server_id}.json", {"url": server.url, **server.facts})

    def probe(self) -> list[Probe]:
        """The eight fixed questions, answered."""
        work, probes = self.work, {}
        asked = probe_questions(work.renderer, work.data.answers, work.limits, work.data.seed)

        def take(prompt: Prompt, reply: Reply | NoReply) -> None:
            if isinstance(reply, NoReply):
                raise UserError(f"server {self.server.url}", got=f"the first questions: {reply.reason}, {reply.detail}",
                                want="answers", fix="does it take token ids at /v1/completions?")  # fmt: skip
            sample = next(sample for sample, other in asked if other.row == prompt.row)
            probes[prompt.row] = Probe(sample, prompt, work.reply_ids(reply)[0], reply.finish_reason)

        self.server.ask_all(iter([prompt for _, prompt in asked]), take)
        return [probes[prompt.row] for _, prompt in asked]

    def answer(self, rows: list[int]) -> None:
        """Ask what has no record yet; every answer is in the journal before the next question of its turn is asked."""
        work, share = self.work, self.work.data.answers.share()
        rows = [row for row in rows[share[0] :: share[1]] if row not in work.journal]
        prompts = work.prompts(rows)
        first = next(prompts, None)
        if first is None:
            return
        if not self.is_ready:
            self.ready(self)
            self.is_ready = True
        progress = Progress("regenerate", len(rows), "answers")
        writer = Writer(work.parts / f"{share_name(work.data.answers.worker)}.jsonl", work.journal)

        def take(prompt: Prompt, reply: Reply | NoReply) -> None:
            if isinstance(reply, NoReply):
                writer.append(no_answer(prompt.row, reply.reason, reply.detail))
                progress.update(1)
                return
            record = work.reply_record(prompt, reply, self.server_id)
            writer.append(record)
            progress.update(1, tokens=len(record["token_ids"]))

        try:
            self.server.ask_all(chain([first], prompts), take)
        finally:
            writer.close()
        progress.close()
        if self.server.num_repeated:
            say(f"server {self.server.url}: {self.server.num_repeated:,} questions were repeated")
