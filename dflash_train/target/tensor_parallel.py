"""A target over several devices, each with a share of every layer's heads and MLP columns: capture, and nothing else.

Rank 0 is the process that extracts. It starts one more process a device (target/tensor_parallel_rank.py), writes a line
about each pass to their stdin and broadcasts the ids; then all run the same forward, whose residual stream is the same
everywhere, since what attention and MLP add to it is summed over the ranks: two all-reduces a layer. The rows are thus
complete on rank 0 and the peers return none.

Whoever is left alone ends: a peer when its stdin closes, which the death of rank 0 does, whatever it was doing; rank 0
by the error of its broken connection, or, where a GPU waits for ever, by a thread that watches the peers.

Sums taken by parts round otherwise, not more: 64 random layers (RandomWeights, toy width, CPU) are 1.7e-2 off their
float32 rows in bfloat16 on one device and on 2 or 4 ranks alike, and 6e-3 off each other (cosine 0.9999).
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.records import Features, FeatureSpec, TargetHead
from dflash_train.target.base import check_layer_ids
from dflash_train.target.files import TargetFiles
from dflash_train.target.sharded_load import FileWeights, check_split
from dflash_train.target.tensor_parallel_check import check_shares
from dflash_train.target.tensor_parallel_rank import GRACE_S, GROUP_TIMEOUT_S, Job, RankModel
from dflash_train.util.device import pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.log import say

LOST_S = 5  # from the loss of a peer to the end of rank 0, unless it ends by itself
PEER_MODULE = "dflash_train.target.tensor_parallel_rank"


def load(config: TargetConfig, hardware: HardwareConfig, files: TargetFiles, ways: int) -> "TensorParallelTarget":
    """The target of these files over the first `ways` visible GPUs, or as many processes on the CPU.

    Raises UserError for a family or a number that cannot be split, GPUs or a weight that are not there, or a layer that
    does not add up (unless target.canary is off).
    """
    device = pick_device(hardware.device, hardware.num_threads)
    if device.type == "cuda" and torch.cuda.device_count() < ways:
        raise UserError("extract.gpus_per_worker", got=ways, want=f"at most {torch.cuda.device_count()}, those visible")
    devices = [f"cuda:{i}" if device.type == "cuda" else "cpu" for i in range(ways)]
    target = start_group(files, getattr(torch, config.dtype), devices, kernels=config.kernels)
    if config.canary:
        try:
            check_shares(target)
        except BaseException:
            target.close(failed=True)
            raise
    return target


def start_group(files: TargetFiles, dtype: torch.dtype, devices: list[str], *, kernels: str = "auto",
                random_seed: int | None = None) -> "TensorParallelTarget":  # fmt: skip
    """Start the peers, load every share at the same time, and meet. random_seed: weights are drawn, no file is read.

    Uses this process's default group of torch.distributed. End it with `close`, or use it as a context manager.
    """
    text = files.hf_config.get_text_config()
    check_split(text, len(devices))
    assert not dist.is_initialized(), "this process is in a group already"
    store = local_store(len(devices))
    job = Job(text.to_dict(), str(files.folder) if random_seed is None else None, random_seed or 0,
              str(dtype).removeprefix("torch."), kernels, list(map(str, devices)), store.port,
              torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled())  # fmt: skip
    peers = []
    try:
        peers += [Peer(job, rank) for rank in range(1, len(devices))]
        model = RankModel(job, 0)
        for peer in peers:
            peer.wait_loaded(store)
        model.join(store, job.share(0))
    except BaseException:
        for peer in peers:
            peer.end()
        raise
    return TensorParallelTarget(files, dtype, model, peers, store)


def local_store(world: int) -> dist.TCPStore:
    """Where the group meets. It asks nobody for a secret, and by itself would listen on every address of the machine,
    whatever host it is given; so it gets a socket that listens on loopback alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, world, is_master=True, wait_for_workers=False,
                         timeout=timedelta(seconds=GROUP_TIMEOUT_S), master_listen_fd=listener.detach())  # fmt: skip


class Peer:
    """A process of the group beside ours, and the pipe that keeps it alive."""

    def __init__(self, job: Job, rank: int):
        self.rank = rank
        self.process = subprocess.Popen([sys.executable, "-m", PEER_MODULE], stdin=subprocess.PIPE)
        self.send(asdict(job) | {"rank": rank})

    def send(self, message: dict) -> None:
        """Raises PeerLost when nobody reads."""
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.lost() from None

    def wait_loaded(self, store: dist.Store) -> None:
        """Until the peer has its weights: no limit but its life, since a disk may be slow."""
        while not store.check([f"loaded {self.rank}"]):
            if self.process.poll() is not None:
                raise self.lost()
            time.sleep(0.05)

    def lost(self) -> "PeerLost":
        return PeerLost(f"rank {self.rank} of the target's group (process {self.process.pid}) ended with status "
                        f"{self.process.poll()}; its own lines above say why")  # fmt: skip

    def end(self, patience_s: float = GRACE_S) -> None:
        """Close its stdin, which ends it, and see it gone."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PeerLost(RuntimeError):
    """Another process of the group ended while it was needed: this one's rows cannot be completed."""


class TensorParallelTarget:
    """Rank 0 of a group, behind the protocol base.TargetModel. It captures; decoding and answering are refused."""

    def __init__(self, files: TargetFiles, dtype: torch.dtype, model: RankModel, peers: list[Peer], store: dist.Store):
        self.files, self.spec, self.tokenizer, self.dtype = files, files.spec, files.tokenizer, dtype
        self.model, self.device, self.decoder, self.layers = model, model.device, model.decoder, model.decoder.layers
        self.text_config = files.hf_config.get_text_config()
        self.delta_layers: list[int] = []  # those that a session would drive: there are none
        self._peers, self._store, self._up_to, self._closed = peers, store, None, False
        self.decoder.register_forward_pre_hook(self._before_library_pass, with_kwargs=True)
        if self.device.type == "cuda":
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def __enter__(self) -> "TensorParallelTarget":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close(failed=kind is not None)

    @torch.inference_mode()
    def capture(self, token_ids: Tensor, layer_ids: tuple[int, ...], last_hidden: bool = False) -> Features:
        """Right-padded token_ids i64[B, T] -> hidden [B, T, L*H] in the order of layer_ids and last_hidden [B, T, H].

        Raises PeerLost when another rank is gone. On a GPU the pass is only queued; see `_watch`.
        """
        if layer_ids or not last_hidden:
            check_layer_ids(layer_ids, self.spec.num_layers)
        ids, by_library = token_ids.to(self.device), self.model.fused is None
        self._up_to = None if last_hidden else max(layer_ids)
        try:
            if not by_library:
                self._announce(ids, by_library)
            return self.model.forward(ids, layer_ids, last_hidden, by_library)
        except RuntimeError as error:
            raise self._explain(error) from error
        finally:
            self._up_to = None

    def head(self) -> TargetHead:
        """Embedding, head and final norm, read from the files onto the CPU."""
        return FileWeights(self.files.folder).head(self.text_config, self.dtype)

    def session(self, capacity: int, features: FeatureSpec):
        raise self._refused("decode")

    def answer(self, prompts: list[list[int]], **options):
        raise self._refused("answer")

    def close(self, failed: bool = False) -> None:
        """End the group: every peer is gone when this returns. failed: this rank is in an error, so do not meet."""
        if self._closed:
            return
        self._closed, met = True, False
        try:
            if not failed:
                for peer in self._peers:
                    peer.send({"stop": True})
                dist.barrier()  # without it, gloo aborts at exit in some runs
                met = True
        except RuntimeError as error:
            raise self._explain(error) from error
        finally:
            if met or self.device.type != "cuda":  # a GPU that waits for a dead peer would hang here
                dist.destroy_process_group()
            for peer in self._peers:
                peer.end()

    # ---------------------------------------------------------------- what the peers are told

    def _before_library_pass(self, decoder, args, kwargs) -> None:
        """Every call of the decoder is a pass of the whole group, the canary's own ones too."""
        self._announce(kwargs["input_ids"], True)

    def _announce(self, token_ids: Tensor, by_library: bool) -> None:
        order = {"shape": list(token_ids.shape), "up_to": self._up_to, "by_library": by_library}
        for peer in self._peers:
            peer.send(order)
        dist.broadcast(token_ids.contiguous(), 0)

    # ---------------------------------------------------------------- lost peers

    def _explain(self, error: RuntimeError) -> RuntimeError:
        """The lost peer behind a broken connection, or the error itself."""
        patience = time.monotonic() + 2
        while not isinstance(error, PeerLost) and time.monotonic() < patience:
            for peer in self._peers:
                if peer.process.poll() is not None:
                    return peer.lost()
            time.sleep(0.05)
        return error

    def _watch(self) -> None:
        """A GPU waits for a dead peer in its own kernel, where no error reaches Python: then this process ends, too,
        and whoever started it takes the work back."""
        while not self._closed:
            gone = [peer for peer in self._peers if peer.process.poll() is not None]
            if gone and not self._closed:
                say(f"{gone[0].lost()}; so this process ends as well, within {LOST_S} s")
                time.sleep(LOST_S)
                if not self._closed:
                    os._exit(1)
            time.sleep(0.5)

    def _refused(self, what: str) -> UserError:
        got = f"a target split over {1 + len(self._peers)} devices, to {what}"
        return UserError("extract.gpus_per_worker", got=got, want="capture only", fix="extract.gpus_per_worker=1")
