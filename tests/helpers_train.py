"""A small synthetic store for the loader's and the trainer's tests, and ways to run training on it."""

import atexit
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from dflash_train import cli
from dflash_train import train as stage
from dflash_train.config import TrainRun
from dflash_train.engine import zero
from dflash_train.records import HiddenShard, TargetHead
from dflash_train.store.fp8 import quantize
from dflash_train.store.local import LocalStore
from dflash_train.store.shard import Marker, ShardFacts, publish_shard, put_manifest, write_shard
from dflash_train.store.target_files import write_target_files
from dflash_train.util import dist

ROOT = Path(__file__).resolve().parents[1]
NAME = "demo-tiny"
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
VOCAB, WIDTH, LAYERS, TAPS, MASK, STOP = 128, 64, 6, [1, 3], 127, 2
TARGET_CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "eos_token_id": STOP,
}  # fmt: skip


def make_shard(shard_id: str, lengths: list[int], seed: int, dtype=torch.bfloat16, prompt: int = 4) -> HiddenShard:
    """Samples whose tokens follow a rule (next = 3 * token + 1 mod 100) that their hidden rows reveal."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, len(TAPS) * WIDTH, generator=torch.Generator().manual_seed(1))
    ids, masks = [], []
    for length in lengths:
        token = int(torch.randint(0, 100, (), generator=generator))
        row = []
        for _ in range(length):
            row.append(token)
            token = (3 * token + 1) % 100
        row[-1] = STOP
        ids += row
        masks += [False] * min(prompt, length) + [True] * max(0, length - prompt)
    token_ids = torch.tensor(ids, dtype=torch.int32)
    noise = 0.1 * torch.randn(len(ids), table.shape[1], generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return HiddenShard([f"{shard_id}/s{j}" for j in range(len(lengths))], token_ids, torch.tensor(masks), offsets,
                       (table[token_ids.long()] + noise).to(dtype), None, {"seed": seed})  # fmt: skip


def make_store(
    root: Path,
    train: list[list[int]],
    heldout: list[list[int]] = (),
    *,
    prompt: int = 4,
    manifest: dict | None = None,
    fp8: bool = False,
) -> LocalStore:
    """train, heldout: sample lengths per shard. fp8: hidden rows in eight bits. Returns the store at root/NAME."""
    store = LocalStore(Path(root, NAME))
    generator = torch.Generator().manual_seed(7)
    embedding = 0.15 * torch.randn(VOCAB, WIDTH, generator=generator)
    facts = {
        "target": {"name": "tiny", "fingerprint": "f" * 16, "config": TARGET_CONFIG, "stop_ids": [STOP]},
        "layer_ids": TAPS,
        "hidden_size": WIDTH, "dtype": "fp8" if fp8 else "bfloat16", "last_hidden": False, "mask_token_id": MASK,
        "chat_template_hash": "t" * 16, "shards": {"train": len(train), "heldout": len(heldout)},
        "samples": {"train": sum(map(len, train)), "heldout": sum(map(len, heldout))},
        "tokens": {"train": sum(map(sum, train)), "heldout": sum(map(sum, heldout))},
    } | (manifest or {})  # fmt: skip
    put_manifest(store, facts, ())
    for split, groups in (("train", train), ("heldout", heldout)):
        for i, lengths in enumerate(groups):
            seed = i + 1000 * (split == "heldout")
            add_shard(store, Path(root), f"{split}-{i:05d}", lengths, seed=seed, prompt=prompt, fp8=fp8)
    head = TargetHead(embedding, embedding, torch.ones(WIDTH), 0.0, 1e-6)
    write_target_files(store, head, {"config.json": json.dumps(TARGET_CONFIG).encode()})
    return store


def add_shard(store: LocalStore, root: Path, shard_id: str, lengths: list[int], seed: int, prompt: int = 4,
              fp8: bool = False) -> Marker:  # fmt: skip
    shard = make_shard(shard_id, lengths, seed, prompt=prompt)
    if fp8:
        codes, scales = quantize(shard.hidden, len(TAPS))
        shard = replace(shard, hidden=codes, hidden_scale=scales)
    path = root / f"{shard_id}.safetensors"
    write_shard(path, shard)
    marker = publish_shard(store, path, ShardFacts.of(shard_id, shard))
    path.unlink()
    return marker


def overrides(folder: Path, **values: object) -> list[str]:
    """Command-line words for a tiny run on the store at folder/store; results in folder/out."""
    settings = {
        "data": "demo", "target": "tiny", "drafter": "tiny", "hardware": "cpu", "hardware.num_threads": 1,
        "store.root": f"{folder}/store", "work_dir": f"{folder}/work", "train.output_dir": f"{folder}/out",
        "train.row_tokens": 48, "train.num_anchors": 8, "train.global_batch": 4, "train.micro_batch": 2,
        "train.lr": 3e-3, "train.dtype": "float32", "train.epochs": 2, "train.log_every": 1, "train.eval_every": 1000,
        "train.save_every": 1000, "train.eval_samples": 4, "train.prefetch_rows": 4, "train.head_chunk_blocks": 16,
        "train.wandb.mode": "disabled",
    } | values  # fmt: skip
    return [f"{key}={'null' if value is None else value}" for key, value in settings.items()]


def build_run(folder: Path, **values: object) -> TrainRun:
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("train", compose("train", cli.rewrite_argv(overrides(folder, **values))))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def one_rank():
    """DeepSpeed alone in this process. The launch variables go again, or a child process would join our group."""
    before = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    if not torch.distributed.is_initialized():
        atexit.register(dist.shutdown)
    zero.start(torch.device("cpu"))
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def run_alone(command: list, timeout_s: float = 240, **variables) -> subprocess.CompletedProcess:
    """A command as a person types it: no launch variables, but those given."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.run(list(map(str, command)), env=environment, cwd=ROOT, capture_output=True, text=True,
                          timeout=timeout_s)  # fmt: skip


def run_here(folder: Path, **values: object) -> stage.Trainer:
    """A whole training in this process."""
    run = build_run(folder, **values)
    trainer = stage.Trainer(run, stage.check(run), torch.device("cpu"))
    trainer.train()
    return trainer


def metrics(folder: Path, key: str = "loss") -> list[dict]:
    """Rows of metrics.jsonl that have `key`."""
    rows = [json.loads(line) for line in Path(folder, "out", "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def comparable(folder: Path) -> list[dict]:
    """metrics.jsonl without its timings."""
    timings = ("elapsed_s", "steps_per_s", "tokens_per_s", "samples_per_s", "blocks_per_s")
    rows = [json.loads(line) for line in Path(folder, "out", "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in timings} for row in rows]


def flat(rows: list[dict]) -> list[float]:
    return [x for row in rows for value in row.values() for x in (value if isinstance(value, list) else [value])]
