"""A target over two gloo processes: rows, the canary, and what happens when one of the two dies."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers_hybrid import relative
from helpers_target import random_ids, tiny

from dflash_train.config import TargetConfig
from dflash_train.records import FeatureSpec
from dflash_train.target import tensor_parallel
from dflash_train.target.canary import check_target
from dflash_train.target.tensor_parallel import PeerLost, local_store, start_group
from dflash_train.target.tensor_parallel_check import check_shares
from dflash_train.util.errors import UserError

BOUND = 1e-4  # float32: a tiny hybrid is 1.5e-5 off its float64 twin; test_tensor_parallel.py has it in float64
TWO = ["cpu", "cpu"]
WAIT_S = 30


def gone(pid: int) -> bool:
    """Whether the process has ended within WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def listening() -> set[str]:
    """Addresses on which this process takes connections."""
    return {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_a_group_meets_on_loopback_alone():
    """Control: left to itself, the same store listens on every address of the machine."""
    before = listening()
    store = local_store(2)
    store.set("a", "b")
    assert dist.TCPStore("127.0.0.1", store.port).get("a") == b"b"
    assert listening() - before <= {"127.0.0.1"} and "127.0.0.1" in listening()
    del store
    open_to_all = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    assert (listening() - before) & {"::", "0.0.0.0"}
    del open_to_all


def test_two_processes_capture_a_hybrids_rows_and_end_together():
    """Rows within 1e-4 in float32 whatever the batch, the stage's canary passes, and decoding is refused."""
    want = tiny("qwen3_5")
    with start_group(want.files, torch.float32, TWO) as target:
        for shape, layer_ids, last in (((3, 70), (2, 0), False), ((1, 9), (0, 1, 2), True), ((2, 5), (), True)):
            ids = random_ids(shape[0] * shape[1], 1).view(shape)
            got, one = target.capture(ids, layer_ids, last), want.capture(ids, layer_ids, last)
            if layer_ids:
                assert got.hidden.shape == one.hidden.shape and relative(got.hidden, one.hidden) < BOUND
            if last:
                assert relative(got.last_hidden, one.last_hidden) < BOUND
        assert check_shares(target) < BOUND
        config = TargetConfig(name="tiny", kind="tiny", dtype="float32")
        assert {finding.check for finding in check_target(target, config, ["capture"], (0, 2))} == {
            "rows", "layers", "padding",
        }  # fmt: skip
        assert torch.equal(target.head().embedding, want.head().embedding)
        for refused in (lambda: target.session(9, FeatureSpec()), lambda: target.answer([[9]])):
            with pytest.raises(UserError, match="gpus_per_worker"):
                refused()
        pids = [peer.process.pid for peer in target._peers]

        qkv = target.layers[0].linear_attn.in_proj_qkv.weight
        qkv.copy_(qkv.roll(16, 0))  # control: a rank whose heads are one off has finite, plausible, wrong rows
        with pytest.raises(UserError, match=r"canary: shares .*\n.*layer 0, linear_attention"):
            check_shares(target)
    assert not dist.is_initialized()
    assert all(map(gone, pids)) and [peer.process.returncode for peer in target._peers] == [0]


def test_a_peer_that_dies_is_an_error_that_names_it_and_leaves_nothing_behind():
    """Qwen3's full attention is split as well; then rank 1 is killed between two passes."""
    want, ids = tiny("qwen3"), random_ids(40, 2)[None]
    with pytest.raises(PeerLost, match=r"rank 1 .* status -9"), start_group(want.files, torch.float32, TWO) as target:
        assert relative(target.capture(ids, (0, 1)).hidden, want.capture(ids, (0, 1)).hidden) < BOUND
        target._peers[0].process.kill()
        for _ in range(3):  # the first broadcast may still fit into the connection's buffers
            target.capture(ids, (0, 1))
    assert not dist.is_initialized()


def test_a_peer_whose_pipe_closes_ends_though_its_pass_never_will():
    """What the death of rank 0 does, with the connection that a GPU's kernel would wait on left open."""
    target = start_group(tiny("qwen3_5").files, torch.float32, TWO)
    try:
        target._announce(torch.zeros(1, 5, dtype=torch.int64), True)
        peer = target._peers[0].process
        time.sleep(0.2)
        assert peer.poll() is None
        peer.stdin.close()
        assert gone(peer.pid) and peer.wait() == 1
    finally:
        target.close(failed=True)
    assert not dist.is_initialized()


RANK_0 = """
import sys, time, torch
from dflash_train.target.tensor_parallel import start_group
from dflash_train.target.tiny import make_tiny_target
if __name__ == "__main__":
    target = start_group(make_tiny_target("qwen3_5").files, torch.float32, ["cpu", "cpu"])
    target._announce(torch.zeros(1, 5, dtype=torch.int64), True)  # the peer now waits inside a pass for our part
    print(target._peers[0].process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_peer_does_not_outlive_rank_0():
    """Kill -9 of rank 0 while the peer waits inside a pass."""
    rank0 = subprocess.Popen([sys.executable, "-c", RANK_0], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(rank0.stdout.readline())
        os.kill(pid, 0)
    finally:
        rank0.send_signal(signal.SIGKILL)
        rank0.wait()
    assert gone(pid)


def test_a_peer_that_cannot_load_ends_the_start(monkeypatch):
    """Rank 0 does not wait for one that will never come."""
    monkeypatch.setattr(tensor_parallel, "PEER_MODULE", "dflash_train.no_such_module")
    with pytest.raises(PeerLost, match="rank 1"):
        start_group(tiny("qwen3").files, torch.float32, TWO)
    assert not dist.is_initialized()


def test_a_group_is_not_started_for_heads_that_do_not_divide():
    with pytest.raises(UserError, match="num_key_value_heads=2"):
        start_group(tiny("qwen3_5").files, torch.float32, ["cpu"] * 4)
