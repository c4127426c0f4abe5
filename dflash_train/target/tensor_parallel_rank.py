"""What every rank of a tensor-parallel target does, and the program of those beside rank 0.

    python -m dflash_train.target.tensor_parallel_rank        started by target/tensor_parallel.py alone

stdin: a Job as one line of JSON, then a line for each pass, then {"stop": true}. It closing before that means that
rank 0 is gone: this process ends at once, even from within a pass that waits for it.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_train.records import Features
from dflash_train.target import fused
from dflash_train.target.base import Taps
from dflash_train.target.sharded_load import COLUMNS, FileWeights, RandomWeights, Share, load_share
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers

GROUP_TIMEOUT_S = 900  # one rank may compile kernels while the other waits; a dead one is found otherwise, and sooner
GRACE_S = 20  # for another process to end by itself


@dataclass(frozen=True)
class Job:
    """All that a rank needs to know, as one line of JSON. folder None: random weights of this seed."""

    text: dict  # the whole model's text config
    folder: str | None
    seed: int
    dtype: str
    kernels: str
    devices: list[str]
    port: int
    num_threads: int
    cudnn_sdp: bool

    def share(self, rank: int) -> Share:
        return Share(rank, len(self.devices))

    def config(self):
        text = dict(self.text)
        return transformers.AutoConfig.for_model(text.pop("model_type"), **text)


class RankModel:
    """One rank's decoder on its device, wired to the group."""

    def __init__(self, job: Job, rank: int):
        self.device = torch.device(job.devices[rank])
        torch.set_num_threads(job.num_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.enable_cudnn_sdp(job.cudnn_sdp)
        text, dtype = job.config(), getattr(torch, job.dtype)
        random = lambda: RandomWeights(text, job.seed, dtype, self.device)
        weights = random() if job.folder is None else FileWeights(Path(job.folder))
        self.decoder = load_share(text, weights, job.share(rank), dtype, self.device)
        sum_outputs(self.decoder, dist.all_reduce)
        self.fused = fused.choose(job.kernels, self.decoder, self.device)

    def join(self, store: dist.Store, share: Share) -> None:
        """Meet the other ranks; all of them must have loaded."""
        on_gpu = self.device.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=share.rank, world_size=share.world,
                                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                                device_id=self.device if on_gpu else None)  # fmt: skip

    def forward(self, token_ids: Tensor, layer_ids: tuple[int, ...], last_hidden: bool, by_library: bool) -> Features:
        """Rows of ids [B, T] on this device, as `TargetModel.capture` says. Every rank runs it at once."""
        if not by_library:
            return self.fused(token_ids, layer_ids, last_hidden)
        normed = None
        with Taps(self.decoder.layers, layer_ids, stop=not last_hidden) as taps:
            normed = self.decoder(input_ids=token_ids, use_cache=False).last_hidden_state
        return Features(taps.hidden(), normed)


def sum_outputs(decoder: nn.Module, all_reduce: Callable[[Tensor], object]) -> None:
    """Let what each rank's heads and MLP columns add to the residual stream be summed over the ranks, in place.

    The hooks are on the last product of each block, so every path through the layers must call it as a module.
    """

    def add_up(module: nn.Module, args, output: Tensor) -> None:
        all_reduce(output)

    for name, module in decoder.named_modules():
        if name.endswith(COLUMNS):
            module.register_forward_hook(add_up)


# ---------------------------------------------------------------- ranks 1..


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach rank 0 as well, which ends us when its batch is done
    orders = read_orders()
    first = next(orders)
    rank = first.pop("rank")
    job = Job(**first)
    store = dist.TCPStore("127.0.0.1", job.port, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    try:
        model = RankModel(job, rank)
    except UserError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return 2
    store.set(f"loaded {rank}", "yes")
    model.join(store, job.share(rank))
    for order in orders:
        run(model, order)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def read_orders() -> Iterator[dict]:
    """Lines of stdin up to the stop, read by a thread of its own: it sees the end of rank 0 whatever we wait for."""
    arrived: queue.Queue[dict] = queue.Queue()

    def read() -> None:
        stopping = False
        with open(0, "rb", buffering=0, closefd=False) as lines:  # sys.stdin's lock would be missed at the end
            for line in lines:
                order = json.loads(line)
                arrived.put(order)
                stopping = "stop" in order
        time.sleep(GRACE_S if stopping else 0)
        os._exit(1)

    threading.Thread(target=read, name="orders", daemon=True).start()
    return iter(arrived.get, {"stop": True})


@torch.inference_mode()
def run(model: RankModel, order: dict) -> None:
    """One pass: the ids come from rank 0, the rows stay there."""
    token_ids = torch.empty(order["shape"], dtype=torch.int64, device=model.device)
    dist.broadcast(token_ids, 0)
    up_to = order["up_to"]
    layer_ids = () if up_to is None else (up_to,)
    model.forward(token_ids, layer_ids, last_hidden=up_to is None, by_library=order["by_library"])


if __name__ == "__main__":
    sys.exit(main())
