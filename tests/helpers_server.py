"""A real HTTP server on loopback that answers /v1/completions as a fixed function of the question, and misbehaves on
purpose. It counts what it was asked and what it answered in full."""

import hashlib
import json
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers_data import mix_manifest

from dflash_train.config import (
    AnswersConfig,
    ClientConfig,
    DataConfig,
    HardwareConfig,
    RegenerateRun,
    SamplingConfig,
    SourceConfig,
    TargetConfig,
)
from dflash_train.records import Sample
from dflash_train.target.tiny import tiny_tokenizer
from dflash_train.util.io import read_jsonl, write_json, write_jsonl

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu")
END = 2  # <|im_end|>


class FakeServer:
    """fault(how often this question came before, its key) -> None, or what goes wrong: an HTTP status, "stall", "drip",
    "cut", "cut, of no stated length" or "aborted". A key names prompt and seed (`question_key`)."""

    def __init__(self, answer=None, fault=None, *, model: str = "tiny", page: dict | None = None, delay_s: float = 0.0):
        self.tokenizer = tiny_tokenizer()
        self.answer = answer or self.plain_answer
        self.fault = fault or (lambda number, key: None)
        self.model, self.page, self.delay_s = model, page or {}, delay_s
        self.asked, self.answered, self.faults = Counter(), Counter(), Counter()
        self.bodies, self.headers = [], []
        self.lock, self.closing, self.sockets = threading.Lock(), threading.Event(), set()
        self.http, self.port = None, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """On the port it had before, if it had one."""
        self.closing, self.sockets = threading.Event(), set()
        handler = type("Handler", (_Handler,), {"fake": self, "closing": self.closing, "sockets": self.sockets})
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.http.daemon_threads, self.port = True, self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Every connection is cut, whatever was under way."""
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        self.stop()
        time.sleep(0.1)
        self.start()

    def plain_answer(self, body: dict) -> dict:
        """Words chosen by the question's hash, with a thought where thinking is on; greedy ones ignore the seed."""
        prompt = self.tokenizer.decode(body["prompt"])
        seed = body["seed"] if body["temperature"] > 0 else 0
        digest = hashlib.sha256(f"{prompt}|{seed}|{body['temperature']}".encode()).digest()
        text = " ".join(WORDS[byte % len(WORDS)] for byte in digest[:6])
        if not prompt.endswith("</think>\n\n"):
            text = f"<think>\n{text[:9]}\n</think>\n\n{text}"
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: body["max_tokens"]]
        stopped = len(ids) < body["max_tokens"]
        return {"text": self.tokenizer.decode(ids), "token_ids": [*ids, END] if stopped else ids,
                "finish_reason": "stop" if stopped else "length", "prompt_token_ids": body["prompt"]}  # fmt: skip


def question_key(prompt_ids: list[int], seed: int) -> str:
    return hashlib.sha256(json.dumps([prompt_ids, seed]).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    closing: threading.Event
    sockets: set
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.sockets.add(self.connection)

    def finish(self) -> None:
        self.sockets.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        pages = {"/v1/models": {"data": [{"id": fake.model, **fake.page}]}, "/version": {"version": "1.2.3"}}
        self._send(200, pages[self.path]) if self.path in pages else self._send(404, {"error": "no such page"})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = "alive" if body["max_tokens"] == 1 else question_key(body["prompt"], body["seed"])
        with fake.lock:
            number = fake.asked[key]
            fake.asked[key] += 1
            fake.bodies.append(body)
            fake.headers.append(dict(self.headers))
        fault = fake.fault(number, key)
        if fault is None:
            reply = {"choices": [fake.answer(body)]}
            if self.closing.wait(fake.delay_s):
                self.close_connection = True
            elif self._send(200, reply):
                with fake.lock:
                    fake.answered[key] += 1
            return
        with fake.lock:
            fake.faults[fault] += 1
        if fault == "stall":
            self.closing.wait(5)
            self.close_connection = True
        elif fault == "drip":
            self._send(200, {"choices": [fake.answer(body)]}, byte_s=0.05)
        elif fault == "cut":
            self._send(200, {"choices": [fake.answer(body)]}, cut=True)
        elif fault == "cut, of no stated length":
            self._send(200, {"choices": [fake.answer(body)]}, cut=True, stated=False)
        elif fault == "aborted":
            self._send(200, {"choices": [{**fake.answer(body), "finish_reason": "abort"}]})
        else:  # a status
            self._send(int(fault), {"error": f"status {fault}"}, {"Retry-After": "0"} if fault == "429" else {})

    def _send(self, status: int, value: dict, headers: dict | None = None, cut: bool = False, stated: bool = True,
              byte_s: float = 0.0) -> bool:  # fmt: skip
        """Whether all of it was sent. byte_s: the pause behind each byte."""
        data = json.dumps(value).encode()
        try:
            self.send_response(status)
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            if stated:
                self.send_header("Content-Length", str(len(data)))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            data = data[: len(data) // 2] if cut else data
            for piece in [data[i : i + 1] for i in range(len(data))] if byte_s else [data]:
                self.wfile.write(piece)
                self.wfile.flush()
                if byte_s and self.closing.wait(byte_s):
                    return False
            self.close_connection = cut or not stated
            return not cut
        except OSError:  # the client is gone
            self.close_connection = True
            return False


# ---------------------------------------------------------------- runs against it


def make_sample(i: int, split: str = "train", source: str = "one", text: str | None = None) -> Sample:
    messages = [{"role": "user", "content": text or f"question {i}, please?"}]
    return Sample(f"{source}/{i}", source, "MIT", "chat", split, "on" if i % 3 == 0 else "off", messages)


def served_run(folder, url: str | None, num_train: int = 40, train=None, reserve=(), client=None,
               **changes) -> RegenerateRun:  # fmt: skip
    """A run on the tiny target's tokenizer, its mix written on first use."""
    quick = {"concurrency": 8, "timeout_s": 1.0, "patience_s": 20.0, "backoff_s": 0.02, "retries": 4}
    client = ClientConfig(**quick | (client or {}))
    answers = AnswersConfig(max_new_tokens=200, greedy_share=0.3, server=url, client=client,
                            off=SamplingConfig(0.7, 0.8, 20), on=SamplingConfig(1.0, 0.95, 20))  # fmt: skip
    data = DataConfig(name="toy", sources={"one": SourceConfig(path="x")}, answers=replace(answers, **changes))
    run = RegenerateRun("regenerate", f"{folder}/run", str(folder), hardware=HardwareConfig("cpu"), data=data,
                        target=TargetConfig(name="tiny", kind="tiny", dtype="float32", mask_token_id=127))  # fmt: skip
    if not run.mix_dir.exists():
        train = [make_sample(i) for i in range(num_train)] if train is None else train
        splits = {"prompts": train, "heldout": [make_sample(1000 + i, "heldout") for i in range(3)], "reserve": reserve}
        for name, samples in splits.items():
            if name != "reserve" or samples:
                write_jsonl(run.mix_dir / f"{name}.jsonl", (sample.to_json() for sample in samples))
        write_json(run.mix_dir / "manifest.json", mix_manifest(run.data))
    return run


@pytest.fixture(name="fake")
def fake_servers():
    servers = []

    def make(*arguments, **options) -> FakeServer:
        servers.append(FakeServer(*arguments, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def rows_of(folder: Path) -> list[dict]:
    return [row for name in ("samples.jsonl", "heldout.jsonl") for row in read_jsonl(folder / name)]
