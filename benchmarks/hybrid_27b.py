"""Capture and tree verification at Qwen3.6-27B's sizes on one GPU: do they run, how fast, and do they agree?

    python benchmarks/hybrid_27b.py [--out runs/hybrid_27b]    one H200, about two minutes, nothing to download
    python benchmarks/hybrid_27b.py --tiny                     the same code at toy sizes on a CPU: seconds

The weights are random, so no text means anything; sizes, rates, bytes and rounding are the real model's. Matrices have
std 0.02, norm gains are 0.5..2 and gates remember (tiny.draw_). Embeddings have std 1 and each of the N layers adds a
1/sqrt(2N) of that: else 64 random layers amplify one rounding until bfloat16 agrees with nothing, itself included.

Matrix rate and copy bandwidth are measured first, in the same process, and everything is set against them. A part that
fails is named, the others still run, and the exit code is 1; so it is when an agreement is beyond its bound.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from hybrid_27b_table import beyond, markdown
from hybrid_agreement import (
    Paths,
    chain,
    error,
    layer_agreement,
    model_agreement,
    random_tree,
    tree_of,
)
from run_parts import Run
from torch import Tensor
from yardstick import Peak, num_bytes, yardstick

from dflash_train.records import FeatureSpec, Tree
from dflash_train.target.hf import HFTarget
from dflash_train.target.random_weights import Options, describe, draw
from dflash_train.target.tiny import tiny_tokenizer
from dflash_train.util.device import pick_device
from dflash_train.util.hf import transformers
from dflash_train.util.io import write_bytes
from dflash_train.util.log import say
from dflash_train.util.timing import now_s


@dataclass(frozen=True)
class Sizes:
    """The model, and what is done with it. verify: (shape, nodes); padded: lengths in one right-padded batch."""

    hidden: int = 5120
    intermediate: int = 17408
    num_layers: int = 64
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    linear_key_heads: int = 16
    linear_value_heads: int = 48
    linear_head_dim: int = 128
    vocab: int = 248320
    std: float = 0.02
    layer_ids: tuple[int, ...] = (1, 16, 31, 46, 61)
    batches: tuple[tuple[int, int], ...] = ((16, 2048), (64, 256))
    padded: tuple[int, ...] = (300, 512, 64, 129)
    context: int = 4096
    verify: tuple[tuple[str, int], ...] = (("chain", 1), ("chain", 16), ("tree", 16), ("tree", 64), ("tree", 128),
                                           ("tree", 256))  # fmt: skip
    prefix: int = 512
    agreement_nodes: tuple[int, ...] = (16, 64)
    matrix: int = 8192
    copy_bytes: int = 4 << 30


TINY = Sizes(hidden=64, intermediate=128, num_layers=8, heads=4, kv_heads=2, head_dim=16, linear_key_heads=2,
             linear_value_heads=4, linear_head_dim=16, vocab=128, std=0.15, layer_ids=(1, 3, 6),
             batches=((2, 64), (4, 16)), padded=(20, 40, 9), context=80, verify=(("chain", 4), ("tree", 12)),
             prefix=70, agreement_nodes=(12,), matrix=256, copy_bytes=1 << 20)  # fmt: skip
ROUNDS = 5


# ---------------------------------------------------------------- the model


def hf_config(sizes: Sizes):
    return transformers.Qwen3_5TextConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim,
        linear_num_key_heads=sizes.linear_key_heads, linear_num_value_heads=sizes.linear_value_heads,
        linear_key_head_dim=sizes.linear_head_dim, linear_value_head_dim=sizes.linear_head_dim,
        vocab_size=sizes.vocab, rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=262144,
        eos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip


def build(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[HFTarget, dict]:
    """Random weights, drawn where they stay. The tokenizer is a stand-in: nothing here is text."""
    start = now_s(device)
    files = describe(hf_config(sizes), Path("random weights"), tiny_tokenizer(), "random weights", "none")
    target = draw(files, Options(std=sizes.std), dtype, device, "library")
    layer_bytes = [num_bytes(*layer.parameters()) for layer in target.layers]
    parameters = list(target.model.parameters())
    return target, {
        "build_s": now_s(device) - start, "num_parameters": sum(p.numel() for p in parameters),
        "weight_bytes": num_bytes(*parameters), "layer_bytes": layer_bytes,
        "weights_read_by_a_pass_bytes": sum(layer_bytes) + num_bytes(target.lm_head.weight),
    }  # fmt: skip


def random_ids(vocab: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- capture


@torch.inference_mode()
def capture(target: HFTarget, sizes: Sizes, batch: int, length: int) -> dict:
    """Rate of the library's forward up to the last captured layer; what it gives must be numbers, no row all zero."""
    ids, seconds = random_ids(sizes.vocab, batch, length), []
    with Peak(target.device) as peak:
        for _ in range(4):  # the first one compiles
            rows = None  # the last one's would count as this one's memory
            start = now_s(target.device)
            rows = target.capture(ids, sizes.layer_ids).hidden
            seconds.append(now_s(target.device) - start)
    layers = rows.chunk(len(sizes.layer_ids), dim=-1)
    per_token = 2 * sum(p.numel() for layer in target.layers[: max(sizes.layer_ids) + 1] for p in layer.parameters())
    rate = batch * length / median(seconds[1:])
    return {"batch": batch, "length": length, "seconds": seconds, "tokens_per_s": rate, "peak_bytes": peak.bytes,
            "gflop_per_token": per_token / 1e9, "tflops": rate * per_token / 1e12,
            "finite": all(bool(layer.isfinite().all()) for layer in layers),
            "zero_rows": sum(int((layer == 0).all(-1).sum()) for layer in layers)}  # fmt: skip


@torch.inference_mode()
def padding(target: HFTarget, sizes: Sizes) -> dict:
    """The first row of a right-padded batch against the same row alone."""
    ids = random_ids(sizes.vocab, len(sizes.padded), max(sizes.padded))
    for row, length in zip(ids, sizes.padded, strict=True):
        row[length:] = 0
    real = slice(sizes.padded[0])
    split = lambda features: features.hidden[0, real].chunk(len(sizes.layer_ids), dim=-1)
    batch, alone = split(target.capture(ids, sizes.layer_ids)), split(target.capture(ids[:1, real], sizes.layer_ids))
    return {f"layer {i}": error(got, want) for i, got, want in zip(sizes.layer_ids, batch, alone, strict=True)}


# ---------------------------------------------------------------- a session


def drafted(shape: str, num_nodes: int, vocab: int) -> Tree:
    if shape == "chain":
        return tree_of(random_ids(vocab, num_nodes, seed=num_nodes), chain(num_nodes))
    return random_tree(num_nodes, vocab, seed=num_nodes)


@torch.inference_mode()
def session(target: HFTarget, sizes: Sizes, read_bytes: int, bytes_per_s: float) -> dict:
    """Prefill, then rounds of verify and commit of each tree; its own bound beside each: weights and KV read once."""
    trees = [drafted(shape, nodes, sizes.vocab) for shape, nodes in sizes.verify]
    paths = [Paths.of(tree.parents).longest() for tree in trees]
    capacity = sizes.context + ROUNDS * sum(map(len, paths)) + max(map(len, trees))
    prefills = []
    for _ in range(2):  # the first one allocates
        open_session = target.session(capacity, FeatureSpec(sizes.layer_ids))
        buffers = [*open_session.cache.keys.values(), *open_session.cache.values.values()]
        for buffer in buffers:
            buffer.fill_(float("nan"))  # whatever reads a row that was never written, shows
        start = now_s(target.device)
        with Peak(target.device) as peak:
            open_session.prefill(random_ids(sizes.vocab, sizes.context))
        prefills.append(now_s(target.device) - start)
    delta = open_session.delta_layers
    kv_row_bytes = num_bytes(*buffers) // capacity
    figures = {"context": sizes.context, "prefill_s": prefills[-1], "prefill_peak_bytes": peak.bytes,
               "kv_bytes_per_token": kv_row_bytes, "conv_bytes": num_bytes(*(layer.rows for layer in delta)),
               "state_bytes": num_bytes(*(layer.state for layer in delta)), "verify": []}  # fmt: skip
    for (shape, _), tree, path in zip(sizes.verify, trees, paths, strict=True):
        bound_s = (read_bytes + kv_row_bytes * open_session.length) / bytes_per_s
        round_ = verify(open_session, tree, path)
        figures["verify"].append({"shape": shape, "nodes": len(tree), "path": len(path), "bound_ms": 1e3 * bound_s,
                                  "times_bound": round_["verify_ms"] / (1e3 * bound_s), **round_})  # fmt: skip
    return figures


def verify(open_session, tree: Tree, path: list[int]) -> dict:
    """Medians of ROUNDS rounds, each committing `path`, after one forward to warm up."""
    device, verify_s, commit_s, finite = open_session.target.device, [], [], True
    open_session.forward(tree)
    with Peak(device) as peak:
        for _ in range(ROUNDS):
            start = now_s(device)
            logits, _ = open_session.forward(tree)
            verify_s.append(now_s(device) - start)
            finite = finite and bool(logits.isfinite().all())
            del logits  # the next round's memory is its own
            pending = [layer.pending for layer in open_session.delta_layers]
            stash_bytes = sum(num_bytes(rows, kept.keys, kept.updates, kept.gates) for rows, _, kept in pending)
            del pending
            start = now_s(device)
            open_session.commit(path)
            commit_s.append(now_s(device) - start)
    return {"verify_ms": 1e3 * median(verify_s), "verify_ms_all": [1e3 * s for s in verify_s],
            "commit_ms": 1e3 * median(commit_s), "stash_bytes": stash_bytes, "peak_bytes": peak.bytes,
            "finite": finite}  # fmt: skip


# ---------------------------------------------------------------- all of it


def measure(sizes: Sizes, dtype: torch.dtype, device: torch.device, path: Path) -> Run:
    """Everything, in order."""
    run, dtype_name = Run(path, lambda figures: {"beyond": beyond(figures)}), str(dtype).removeprefix("torch.")
    run.keep("machine", lambda: {"dtype": dtype_name, **yardstick(device, dtype, sizes.matrix, sizes.copy_bytes)})
    built = run.part("build", lambda: build(sizes, dtype, device))
    if built is None:
        return run
    target, run.figures["build"] = built
    for shape in sizes.batches:
        run.keep("capture {}x{}".format(*shape), partial(capture, target, sizes, *shape))
    run.keep("padding", lambda: padding(target, sizes))
    read_bytes = run.figures["build"]["weights_read_by_a_pass_bytes"]
    run.keep("session", lambda: session(target, sizes, read_bytes, run.figures["machine"]["copy_tb_s"] * 1e12))
    prefix = random_ids(sizes.vocab, sizes.prefix, seed=2)
    for nodes in sizes.agreement_nodes:
        tree = random_tree(nodes, sizes.vocab, seed=3)
        run.keep(f"layers {nodes}", partial(layer_agreement, target, sizes.prefix, tree.parents))
        # Float64 takes its time: the smallest tree is enough.
        exact = nodes == min(sizes.agreement_nodes)
        run.keep(f"model {nodes}", partial(model_agreement, target, prefix, tree, sizes.layer_ids, exact))
    return run


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="runs/hybrid_27b", help="folder for the figures (JSON) and the table")
    parser.add_argument("--tiny", action="store_true", help="toy sizes in float32 and bfloat16: seconds on a CPU")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    device, good = pick_device(args.device), True
    for dtype in (torch.float32, torch.bfloat16) if args.tiny else (torch.bfloat16,):
        path = Path(args.out, f"{str(dtype).removeprefix('torch.')}.json")
        run = measure(TINY if args.tiny else Sizes(), dtype, device, path)
        table = markdown(run.figures, run.failed)
        write_bytes(path.with_suffix(".md"), table.encode() + b"\n")
        say(f"\n{table}\n")
        good = good and not run.failed and not beyond(run.figures)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
