"""Small shards, stores that fail on purpose, and an extraction run on a tiny target."""

import json
import random
from pathlib import Path

import torch

from dflash_train.config import (
    AnswersConfig,
    DataConfig,
    ExtractConfig,
    ExtractRun,
    HardwareConfig,
    SourceConfig,
    StoreConfig,
    TargetConfig,
)
from dflash_train.records import HiddenShard, Sample
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.local import LocalStore
from dflash_train.store.shard import Marker, ShardFacts, publish_shard, write_shard


def make_shard(lengths=(3, 5, 2), width=8, seed=0, dtype=torch.bfloat16, last_hidden=None, prefix="s") -> HiddenShard:
    """Random rows; the second half of every sample is supervised."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= n // 2 for n in lengths])
    rows = lambda columns: torch.randn(total, columns, generator=generator).to(dtype)
    return HiddenShard(
        [f"{prefix}{i}" for i in range(len(lengths))],
        torch.randint(0, 100, (total,), generator=generator, dtype=torch.int32),
        mask,
        torch.tensor([0, *lengths]).cumsum(0),
        rows(width),
        rows(last_hidden) if last_hidden else None,
        {"made_by": "test", "layer_ids": [1, 2]},
    )


def publish(store, folder: Path, shard_id: str, shard: HiddenShard) -> Marker:
    path = Path(folder, f"{shard_id}.safetensors")
    write_shard(path, shard)
    return publish_shard(store, path, ShardFacts.of(shard_id, shard))


class FlakyStore(LocalStore):
    """A folder store whose PUTs of shards fail: the first `failures` times, or for ever with -1."""

    def __init__(self, folder, failures: int, error=None):
        super().__init__(folder)
        self.failures = failures
        self.error = error or StoreUnavailable("flaky", got="HTTP 503", want="success")
        self.puts = 0

    def put_file(self, key, path):
        self.puts += 1
        if self.failures != 0:
            self.failures -= 1
            raise self.error
        super().put_file(key, path)


def make_run(folder: Path, **changes) -> ExtractRun:
    """An extraction of the tiny target into a folder store, with 8 train and 2 held-out samples already answered."""
    run = ExtractRun(
        stage="extract",
        run_dir=str(folder / "run"),
        work_dir=str(folder / "work"),
        hardware=HardwareConfig(device="cpu", num_threads=1),
        data=DataConfig(name="toy", sources={"toy": SourceConfig(kind="files", path="toy.jsonl")},
                        answers=AnswersConfig(min_answer_tokens=1)),
        target=TargetConfig(name="tiny", kind="tiny", dtype="float32", mask_token_id=127, options={}),
        extract=ExtractConfig(layer_ids=[0, 1], max_tokens=64, batch_tokens=128, window_samples=8),
        store=StoreConfig(kind="local", root=str(folder / "store"), dtype="float32", shard_bytes=60 * 517,
                          staging_dir=str(folder / "staging")),
    )  # fmt: skip
    for key, value in changes.items():
        part, name = key.split("__")
        setattr(getattr(run, part), name, value)
    write_answers(run)
    return run


def write_answers(run: ExtractRun, num_train: int = 8, num_heldout: int = 2, seed: int = 0) -> None:
    rng = random.Random(seed)
    text = lambda n: "".join(rng.choice("abcdefgh ijklm") for _ in range(n)).strip() or "x"

    def sample(split: str, number: int) -> dict:
        turns = [("user", text(4 + number)), ("assistant", text(10 + 2 * number))]
        messages = [{"role": role, "content": content} for role, content in turns]
        return Sample(f"{split}-{number}", "toy", "MIT", "chat", split, "off", messages).to_json()

    run.answers_dir.mkdir(parents=True, exist_ok=True)
    for split, name, count in (("train", "samples.jsonl", num_train), ("heldout", "heldout.jsonl", num_heldout)):
        lines = [json.dumps(sample(split, number)) + "\n" for number in range(count)]
        (run.answers_dir / name).write_text("".join(lines))
    (run.answers_dir / "manifest.json").write_text("{}")
