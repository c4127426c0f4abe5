"""A target over two GPUs by NCCL: rows, and a peer's death while a kernel waits for it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_hybrid import relative
from helpers_target import random_ids

from dflash_train.target.base import TargetSpec
from dflash_train.target.files import TargetFiles
from dflash_train.target.tensor_parallel import start_group
from dflash_train.target.tiny import tiny_tokenizer
from dflash_train.util.hf import transformers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYERS = (0, 3, 6)


def random_files() -> TargetFiles:
    """A hybrid with the 27B's ratios of heads and its head widths."""
    text = transformers.Qwen3_5TextConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=2,
        head_dim=128, linear_num_key_heads=4, linear_num_value_heads=12, linear_key_head_dim=128,
        linear_value_head_dim=128, vocab_size=256, tie_word_embeddings=False,
    )  # fmt: skip
    return TargetFiles(Path("random"), text, tiny_tokenizer(), TargetSpec("random", 8, 512, 256, 256, (0,), "none"))


@pytest.mark.parametrize("kernels", ("library", "fused"))
def test_two_gpus_capture_the_rows_of_one(kernels):
    """bfloat16, padded batches of two shapes; a group of one rank is the same code without a partner."""
    batches = [random_ids(4 * 300, 1).view(4, 300), random_ids(2 * 70, 2).view(2, 70)]
    rows = []
    for devices in (["cuda:0"], ["cuda:0", "cuda:1"]):
        with start_group(random_files(), torch.bfloat16, devices, kernels=kernels, random_seed=1) as target:
            rows.append([target.capture(ids, LAYERS, True) for ids in batches])
            rows[-1] = [(got.hidden.float().cpu(), got.last_hidden.float().cpu()) for got in rows[-1]]
    for one, two in zip(*rows, strict=True):
        for want, got in zip(one, two, strict=True):
            assert got.isfinite().all() and relative(got, want) < 0.02


LEFT_ALONE = """
import sys, torch
sys.path.insert(0, "tests")
from test_tensor_parallel_gpu import random_files
from dflash_train.target.tensor_parallel import start_group
target = start_group(random_files(), torch.bfloat16, ["cuda:0", "cuda:1"], kernels="library", random_seed=1)
ids = torch.zeros(2, 70, dtype=torch.int64)
target.capture(ids, (6,))
torch.cuda.synchronize()
target._peers[0].process.kill()
target._peers[0].process.wait()
try:
    target._announce(ids, True)
except Exception:
    pass
target.model.forward(ids.cuda(), (6,), False, True)
torch.cuda.synchronize()  # for ever
print("went on", flush=True)
"""


def test_rank_0_ends_when_its_peer_is_dead_and_its_kernels_wait():
    ended = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and "went on" not in ended.stdout
