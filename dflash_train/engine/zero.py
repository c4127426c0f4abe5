"""DeepSpeed ZeRO 1, 2, 3 around any module: start, one engine, exact sum-then-divide, gathered weights.

The step is `sum over all tokens / D`: with D known before the first backward, every micro-batch gives
`engine.backward(numerator * world / D, scale_wrt_gas=False)`; ZeRO's mean over ranks takes the `world` back out.
"""

import contextlib
import logging
import os
import socket
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_train.config import TrainConfig, ZeroConfig
from dflash_train.engine.masters import Masters
from dflash_train.engine.state_files import read_state, write_state
from dflash_train.util import dist
from dflash_train.util.errors import UserError


def start(device: torch.device) -> None:
    """Join the process group (nccl on GPUs, gloo on CPUs), with or without a launcher.

    Raises UserError when a launcher set only part of its variables.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    _fill_launch_variables()
    deepspeed = _import_deepspeed()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Its shared-memory collective would be compiled here (20 s to minutes); gloo needs no build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)


def _fill_launch_variables() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if not missing:
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("launch environment", got=f"WORLD_SIZE={os.environ['WORLD_SIZE']} without {', '.join(missing)}",
                        want=", ".join(names), fix="deepspeed --num_gpus N launch/train.py ...")  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name in missing:
        os.environ[name] = alone[name]


def _import_deepspeed():
    """Imported late: it takes seconds, chooses its accelerator once, and talks a lot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    return deepspeed


def deepspeed_config(train: TrainConfig, zero: ZeroConfig, accumulation: int) -> dict:
    """The engine's settings as plain Python values (DeepSpeed refuses OmegaConf nodes)."""
    config = {
        "train_batch_size": int(train.global_batch),
        "train_micro_batch_size_per_gpu": int(train.micro_batch),
        "gradient_accumulation_steps": int(accumulation),
        "gradient_clipping": float(train.clip),
        "zero_optimization": {"stage": int(zero.stage)},
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
    }
    if train.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, vectors (norms, biases) do not. Order is the module's, so that checkpoints line up."""
    named = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in named if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    return [group for group in groups if group["params"]]


class ZeroEngine:
    """One trained module inside DeepSpeed.

    Calling the engine calls the module, with ZeRO-3's parameters gathered; the frozen target head stays outside.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, zero: ZeroConfig, accumulation: int, device: torch.device):
        deepspeed = _import_deepspeed()
        self.device, self.stage, self.accumulation = device, zero.stage, accumulation
        # DeepSpeed's own Adam compiles an extension, which fails on some cards; torch's fused one works at every stage.
        optimizer = torch.optim.AdamW(
            parameter_groups(model.to(device), train.weight_decay), lr=train.lr, betas=(train.beta1, train.beta2),
            fused=device.type == "cuda",
        )  # fmt: skip
        config = deepspeed_config(train, zero, accumulation)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.masters = Masters(self.optimizer, self.engine.module, device)
        self._world = dist.world_size()
        self.num_forwards = 0

    def __call__(self, *args, **kwargs):
        self.num_forwards += 1
        return self.engine(*args, **kwargs)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, numerator: Tensor, denominator: float) -> None:
        """One micro-batch of the window, then DeepSpeed's step, which acts at the window's end only.

        numerator: this rank's summed loss; denominator: the window's D summed over all micro-batches and ranks.
        """
        self.engine.backward(numerator * (self._world / denominator), scale_wrt_gas=False)
        self.engine.step()

    def gradient_norm(self) -> float:
        """Of the last step, before clipping."""
        return float(self.engine.get_global_grad_norm() or 0.0)

    @contextlib.contextmanager
    def evaluating(self):
        """No dropout, no gradients; forward still goes through the engine."""
        self.engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.engine.train()

    def gathered_state_dict(self) -> dict[str, Tensor] | None:
        """The module's whole weights on the CPU of rank 0 (None elsewhere); every rank must call it."""
        import deepspeed

        out = {} if dist.is_main() else None
        module = self.engine.module
        for name, parameter in module.named_parameters():
            gather = deepspeed.zero.GatheredParameters([parameter]) if self.stage == 3 else contextlib.nullcontext()
            with gather:
                if out is not None:
                    out[name] = parameter.detach().to("cpu", copy=True)
        return out

    def save(self, folder: Path) -> int:
        """Masters and moments into `folder`; returns the steps that the optimizer has taken, for `load`. A collective:
        where rank 0 cannot write, every rank raises UserError naming it and the file, and the folder is of no use."""
        write_state(folder, self.masters, self._kinds())
        return self.masters.num_steps

    def load(self, folder: Path, num_steps: int) -> None:
        """What `save` wrote, by any number of ranks at any stage. A collective."""
        read_state(folder, self.masters, self._kinds())
        self.masters.num_steps = num_steps
        self.masters.refresh()

    def _kinds(self) -> dict[str, list[Tensor]]:
        return {"master": self.masters.flats, **self.masters.moments()}
