"""Plans as a person asks for them, and counting the tensors that are alive."""

import copy
import gc
from functools import cache

import torch
from hydra import compose, initialize_config_dir
from torch._subclasses.fake_tensor import FakeTensor

from dflash_train import cli, plan
from dflash_train.config import DrafterConfig, PlanRun
from dflash_train.planning.shapes import TargetSizes, target_sizes


@cache
def _composed(words: tuple[str, ...]) -> PlanRun:
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("plan", compose("plan", cli.rewrite_argv(list(words))))


def build_plan(*words: str) -> PlanRun:
    """The run of these command-line words; composing takes a second, so each is done once."""
    return copy.deepcopy(_composed(words))


@cache
def run_27b(hardware: str = "a6000x2") -> tuple[PlanRun, TargetSizes]:
    """The default run on a machine, its drafter resolved; not to be changed by a test."""
    run = build_plan(f"hardware={hardware}")
    sizes, unknown = target_sizes(run.target)
    assert not unknown
    run.drafter = plan.resolved_drafter(run, sizes)
    return run, sizes


def toy_drafter(**changes) -> DrafterConfig:
    """Small, but with matrices that outweigh everything else."""
    sizes = {"num_layers": 2, "block_size": 4, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4,
             "num_kv_heads": 2, "head_dim": 64, "target_layer_ids": [0, 1], "num_target_layers": 4,
             "target_hidden_size": 256, "vocab_size": 128, "mask_token_id": 127, "rope_theta": 1e4}  # fmt: skip
    return DrafterConfig(name="toy", **(sizes | changes))


def live_bytes(at_least: int = 4096) -> dict[int, tuple[int, torch.dtype]]:
    """Address -> (bytes, dtype) of every storage that a tensor or a gradient in this process holds. Tensors that only
    have a shape, which other tests' tracing leaves behind, hold none."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would follow weak proxies, and some are dead
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.untyped_storage().nbytes() >= at_least:
                    found[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor.dtype)
    return found


def new_bytes(before: dict) -> dict[torch.dtype, int]:
    """Bytes that came since, by dtype."""
    out: dict[torch.dtype, int] = {}
    for address, (num_bytes, dtype) in live_bytes().items():
        if address not in before:
            out[dtype] = out.get(dtype, 0) + num_bytes
    return out
