"""Answers from a server: many questions at once, each asked until it is answered, refused, or the server is given up.

Failures are repeated with growing pauses. A prompt that keeps failing while the server answers others is dropped; a
server from which no answer comes for `patience_s` ends the run, and so does one that refuses a large part.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import httpx

from dflash_train.config import ClientConfig
from dflash_train.data.answers.completions import (
    NoReply,
    Reply,
    Retry,
    complete,
    completion_body,
    served_models,
    version_facts,
)
from dflash_train.data.answers.rules import Prompt
from dflash_train.util.errors import UserError
from dflash_train.util.log import say
from dflash_train.util.retry import backoff_s

MAX_PAUSE_S = 30.0
MAX_REFUSED_SHARE, REFUSED_AFTER = 0.2, 100


class Server:
    """One server during one run. `model` and `facts` are known after `describe`."""

    def __init__(self, url: str, config: ClientConfig, stop_ids: tuple[int, ...]):
        self.url, self.config, self.stop_ids = url.rstrip("/"), config, list(stop_ids)
        self.model, self.facts = config.model, {}
        self.last_answer = time.monotonic()
        self.answered: Prompt | None = None  # the last one: known to be good
        self.num_done = self.num_refused = self.num_repeated = 0
        self.said: set[str] = set()

    def describe(self) -> dict:
        """Model name, longest context and version, as the server says them; waits for one that is still starting.

        Raises UserError where it does not serve the model that is wanted."""
        return self._run(self._describe)

    def ask_all(self, prompts: Iterator[Prompt], on_reply: Callable[[Prompt, Reply | NoReply], None]) -> None:
        """Ask every prompt, `concurrency` at a time, taken from the iterator as the server gets through them.

        on_reply is called once a prompt, in the order in which they end. Raises UserError when the server is given up.
        """

        async def work(client: httpx.AsyncClient) -> None:
            for prompt in prompts:
                on_reply(prompt, await self._ask(client, prompt))

        async def everything(client: httpx.AsyncClient) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.config.concurrency):
                    group.create_task(work(client))

        self.last_answer = time.monotonic()
        try:
            self._run(everything)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _run(self, body: Callable[[httpx.AsyncClient], Awaitable]):
        """Run `body` with a client of this server's settings; the key goes into its header and nowhere else."""
        config, key = self.config, os.environ.get(self.config.key_env)
        timeout = httpx.Timeout(config.timeout_s, connect=min(10.0, config.timeout_s / 2), pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        async def with_client():
            async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:
                return await body(client)

        return asyncio.run(with_client())

    async def _ask(self, client: httpx.AsyncClient, prompt: Prompt) -> Reply | NoReply:
        """Until there is an answer, or a reason why this prompt gets none."""
        failures = tries = 0
        while True:
            try:
                reply = await self._complete(client, prompt)
                break
            except Retry as retry:
                tries, failures = tries + 1, failures + retry.blame
                if failures > self.config.retries and await self._answers_others(client):
                    reply = NoReply("server_failed", retry.what)
                    break
                await self._pause(retry, tries)
        self.last_answer = time.monotonic()
        self.num_done += 1
        if isinstance(reply, NoReply):
            self.num_refused += 1
            self._check_refusals(reply)
        else:
            self.answered = prompt
        return reply

    async def _complete(self, client: httpx.AsyncClient, prompt: Prompt) -> Reply | NoReply:
        return await complete(client, self.url, prompt, completion_body(self.model, prompt, self.stop_ids))

    async def _answers_others(self, client: httpx.AsyncClient) -> bool:
        """Whether one token comes for a prompt that was answered before: then a failing prompt has itself to blame."""
        if self.answered is None:
            return False
        try:
            await self._complete(client, replace(self.answered, room=1))
        except Retry:
            return False
        return True

    async def _pause(self, retry: Retry, tries: int) -> None:
        """Wait before the next try: doubling, half of it left to chance, so that many do not come back at one moment.
        Raises UserError once no answer at all has come for too long."""
        kind = retry.what.split(":")[0]
        if kind not in self.said:
            self.said.add(kind)
            say(f"server {self.url}: {retry.what}; asking again, with pauses (said once)")
        waited_s = time.monotonic() - self.last_answer
        if waited_s > self.config.patience_s:
            raise UserError(f"server {self.url}", got=f"no answer for {waited_s:.0f} s; the last error: {retry.what}",
                            want=f"one within data.answers.client.patience_s={self.config.patience_s:g}",
                            fix="look into the server's log, then type the same command again: what was answered is "
                            "not asked again")  # fmt: skip
        self.num_repeated += 1
        pause_s = max(retry.pause_s, backoff_s(tries, self.config.backoff_s, MAX_PAUSE_S))
        await asyncio.sleep(min(pause_s, self.config.patience_s))

    def _check_refusals(self, reply: NoReply) -> None:
        if self.num_refused > MAX_REFUSED_SHARE * max(self.num_done, REFUSED_AFTER):
            raise UserError(f"server {self.url}",
                            got=f"{self.num_refused} of {self.num_done} prompts without an answer; the last: {reply}",
                            want=f"at most {MAX_REFUSED_SHARE:.0%}",
                            fix=f'mend the server, and delete the lines with "{reply.reason}" from parts/*.jsonl: '
                            "those are asked again then")  # fmt: skip

    async def _describe(self, client: httpx.AsyncClient) -> dict:
        tries = 0
        while True:
            try:
                models = await served_models(client, self.url)
                break
            except Retry as retry:
                tries += 1
                await self._pause(retry, tries)
        if self.model is None and len(models) == 1:
            self.model = next(iter(models))
        if self.model not in models:
            raise UserError("data.answers.client.model", got=self.model, want=" | ".join(models),
                            fix=f"data.answers.client.model={next(iter(models), '<a model>')}")  # fmt: skip
        self.facts = models[self.model] | await version_facts(client, self.url)
        return self.facts
