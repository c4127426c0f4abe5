"""Ranks of a split target as threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dflash_train.records import Features
from dflash_train.target.base import Taps
from dflash_train.target.sharded_load import FileWeights, Share, load_share
from dflash_train.target.tensor_parallel_rank import sum_outputs
from dflash_train.util.hf import transformers

CPU = torch.device("cpu")


def like_27b(num_layers: int = 4):
    """Three value heads a key head, six query heads a KV head and a gate, as the 27B has them, at toy sizes."""
    return transformers.Qwen3_5TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=24,
        num_key_value_heads=4, head_dim=16, linear_num_key_heads=4, linear_num_value_heads=12, linear_key_head_dim=16,
        linear_value_head_dim=16, vocab_size=128, tie_word_embeddings=False,
    )  # fmt: skip


class ThreadSum:
    """An all-reduce between threads: every rank's tensor becomes the sum of all."""

    def __init__(self, world: int):
        self.barrier, self.parts, self.calls = threading.Barrier(world, timeout=30), [None] * world, [0] * world

    def of(self, rank: int):
        def all_reduce(part: torch.Tensor) -> None:
            self.calls[rank] += 1
            self.parts[rank] = part
            self.barrier.wait()
            total = torch.stack(self.parts).sum(0)
            self.barrier.wait()
            part.copy_(total)

        return all_reduce


def load_ranks(text, weights, world: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    """Every rank's decoder, from a folder of files or from what has a `read`."""
    weights = FileWeights(weights) if isinstance(weights, Path) else weights
    return [load_share(text, weights, Share(rank, world), dtype, CPU) for rank in range(world)]


def run_ranks(decoders: list, token_ids: torch.Tensor, layer_ids: tuple[int, ...], drop: tuple[int, str] | None = None):
    """One pass of all ranks at once -> (Features of each, all-reduces of each). drop: (layer, block) whose sum is left
    out on every rank."""
    summed = ThreadSum(len(decoders))
    for rank, decoder in enumerate(decoders):
        sum_outputs(decoder, summed.of(rank))
        if drop:
            decoder.layers[drop[0]].get_submodule(drop[1])._forward_hooks.clear()

    def one(decoder) -> Features:
        with torch.inference_mode(), Taps(decoder.layers, layer_ids) as taps:
            normed = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
        return Features(taps.hidden(), normed)

    with ThreadPoolExecutor(len(decoders)) as pool:
        return list(pool.map(one, decoders)), summed.calls
