"""What the small hybrid of hybrid_target.py reads: a target's answers to a mix, and the Python sources at hand.

One document a row, padded on its right: with two in a row, the state and the convolution of a Gated DeltaNet layer
would run on from one into the other. Rows come in a few fixed lengths, and a batch holds rows of one length.
"""

import gzip
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.data.packages import stdlib_folder
from dflash_train.records import Sample
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import stable_hash

LICENSES = {"python": "PSF-2.0", "torch": "BSD-3-Clause", "transformers": "Apache-2.0"}
NO_LOSS = -100  # the label cross_entropy leaves out
MIN_PIECE = 16
HELDOUT_EVERY = 50  # of the source files


@dataclass(frozen=True)
class Document:
    """token_ids i32[n] of one row; tokens before loss_from are read, not predicted."""

    token_ids: np.ndarray
    loss_from: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Corpus:
    """Answers and Python sources, each with held-out documents, and what was left out."""

    answers: list[Document] = field(default_factory=list)
    sources: list[Document] = field(default_factory=list)
    heldout_answers: list[Document] = field(default_factory=list)
    heldout_sources: list[Document] = field(default_factory=list)
    heldout_samples: list[Sample] = field(default_factory=list)
    facts: Counter = field(default_factory=Counter)


def read_corpus(paths: list[str], tokenizer, max_length: int, source_chars: int) -> Corpus:
    """`paths`: samples.jsonl or heldout.jsonl of `regenerate`, plain or gzipped. Raises UserError where they have no
    training or no held-out rows, or were written with another tokenizer."""
    corpus, renderer = Corpus(), Renderer(tokenizer)
    for path in paths:
        add_answers(corpus, path, renderer, max_length)
    for name, documents in (("train", corpus.answers), ("heldout", corpus.heldout_answers)):
        if not documents:
            raise UserError("--samples", want="some",
                            got=f"no usable row of split {name} in {', '.join(paths)}; {dict(corpus.facts)}",
                            fix="give samples.jsonl and heldout.jsonl of one `regenerate`")  # fmt: skip
    add_sources(corpus, renderer, max_length, source_chars)
    return corpus


def add_answers(corpus: Corpus, path: str, renderer: Renderer, max_length: int) -> None:
    """Prompt and answer as the target read and wrote them; held-out ones are measured on the answer alone."""
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            sample = Sample.from_json(json.loads(line))
            if number == 0:
                check_tokenizer(sample, renderer, path)
            try:
                rendered = renderer.render(sample)
            except RenderDrop as drop:
                corpus.facts[f"dropped: {drop.reason}"] += 1
                continue
            token_ids = np.array(rendered.token_ids[:max_length], np.int32)
            answer_start = rendered.loss_mask.index(True)
            if answer_start >= len(token_ids):
                corpus.facts["dropped: prompt too long"] += 1
            elif sample.split == "train":
                corpus.answers.append(Document(token_ids))
            else:
                corpus.heldout_answers.append(Document(token_ids, answer_start))
                corpus.heldout_samples.append(sample)


def check_tokenizer(sample: Sample, renderer: Renderer, path: str) -> None:
    """Raise UserError where the recorded ids of an answer do not spell its text."""
    if sample.regen:
        spelled = renderer.tokenizer.decode(sample.regen["token_ids"], skip_special_tokens=True)
        if spelled != sample.messages[-1]["content"]:
            raise UserError(path, got="token ids of another tokenizer", want="answers written with this one")


def add_sources(corpus: Corpus, renderer: Renderer, max_length: int, source_chars: int) -> None:
    """Files in an order of their names' hashes until source_chars are read, each cut into windows of max_length."""
    texts, heldout, num_chars = [], [], 0
    for name, path in source_files():
        if num_chars >= source_chars:
            break
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            corpus.facts["files left out: not UTF-8"] += 1
            continue
        if renderer.any_control.search(text):
            corpus.facts["files left out: they spell a control token"] += 1
            continue
        num_chars += len(text)
        texts.append(text)
        heldout.append(stable_hash("heldout", name) % HELDOUT_EVERY == 0)
    for token_ids, held_out in zip(encode_all(renderer.tokenizer, texts), heldout, strict=True):
        windows = [token_ids[i : i + max_length] for i in range(0, len(token_ids), max_length)]
        pieces = [Document(window) for window in windows if len(window) >= MIN_PIECE]
        (corpus.heldout_sources if held_out else corpus.sources).extend(pieces)
    corpus.facts["source files"], corpus.facts["source characters"] = len(texts), num_chars


def encode_all(tokenizer, texts: list[str], at_once: int = 200) -> Iterator[np.ndarray]:
    """int32 ids of each text; a part of them at a time, since the tokenizer's own records take 100 bytes a token."""
    for start in range(0, len(texts), at_once):
        encoded = tokenizer(texts[start : start + at_once], add_special_tokens=False, return_attention_mask=False,
                            verbose=False)  # fmt: skip
        yield from (np.array(token_ids, np.int32) for token_ids in encoded["input_ids"])


def source_files() -> list[tuple[str, Path]]:
    """(name, path) of every *.py of LICENSES, in an order that is the same on every machine."""
    found = []
    for package in LICENSES:
        if package == "python":
            root = stdlib_folder()
        else:
            root = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        for path in root.rglob("*.py"):
            relative = path.relative_to(root)
            if not {"site-packages", "dist-packages"} & set(relative.parts):
                found.append((f"{package}/{relative.as_posix()}", path))
    return sorted(found, key=lambda item: stable_hash("order", item[0]))


# ---------------------------------------------------------------- batches


@dataclass(frozen=True)
class Batch:
    """token_ids i64[B, T], labels i64[B, T] with NO_LOSS where nothing is predicted; num_tokens without padding."""

    token_ids: Tensor
    labels: Tensor
    num_tokens: int


def collate(documents: list[Document], length: int, num_rows: int, pad_id: int) -> Batch:
    """num_rows rows of `length`; rows without a document are padding, so that shapes stay few."""
    token_ids = np.full((num_rows, length), pad_id, np.int64)
    labels = np.full((num_rows, length), NO_LOSS, np.int64)
    for row, document in enumerate(documents):
        token_ids[row, : len(document)] = document.token_ids
        labels[row, document.loss_from : len(document)] = document.token_ids[document.loss_from :]
    return Batch(torch.from_numpy(token_ids), torch.from_numpy(labels), sum(map(len, documents)))


def fitting(document: Document, lengths: tuple[int, ...]) -> int:
    return next(length for length in lengths if length >= len(document))


def endless(documents: list[Document], seed: int) -> Iterator[Document]:
    """All documents in a fresh seeded order, again and again."""
    for epoch in count():
        for index in np.random.default_rng((seed, epoch)).permutation(len(documents)):
            yield documents[index]


def training_batches(corpus: Corpus, lengths: tuple[int, ...], batch_tokens: int, answer_share: float, pad_id: int,
                     seed: int) -> Iterator[Batch]:  # fmt: skip
    """Batches without end: answer_share of the tokens are answers with their prompts, the rest Python sources."""
    streams = [endless(corpus.answers, 2 * seed), endless(corpus.sources, 2 * seed + 1)]
    num_tokens = [0, 0]
    waiting: dict[int, list[Document]] = {length: [] for length in lengths}
    while True:
        kind = 0 if not corpus.sources or num_tokens[0] <= answer_share * sum(num_tokens) else 1
        document = next(streams[kind])
        num_tokens[kind] += len(document)
        length = fitting(document, lengths)
        waiting[length].append(document)
        if len(waiting[length]) == batch_tokens // length:
            yield collate(waiting.pop(length), length, batch_tokens // length, pad_id)
            waiting[length] = []


def measuring_batches(documents: list[Document], lengths: tuple[int, ...], batch_tokens: int, pad_id: int):
    """Every document once, in batches of the same shapes."""
    for length in lengths:
        rows = [document for document in documents if fitting(document, lengths) == length]
        num_rows = batch_tokens // length
        for start in range(0, len(rows), num_rows):
            yield collate(rows[start : start + num_rows], length, num_rows, pad_id)


def unigram_loss(corpus: Corpus, vocab_size: int) -> float:
    """Nats a token of the held-out answers under the training answers' token frequencies, plus one each."""
    counts = np.ones(vocab_size)
    for document in corpus.answers:
        np.add.at(counts, document.token_ids, 1)
    log_probs = np.log(counts / counts.sum())
    measured = np.concatenate([document.token_ids[document.loss_from :] for document in corpus.heldout_answers])
    return float(-log_probs[measured].mean())
