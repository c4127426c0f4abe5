"""Machines: profiles, detection, and stages that refuse to run on another one."""

from dataclasses import replace

import psutil
import pytest
from helpers_plan import build_plan

from dflash_train import cli, plan
from dflash_train.config import HardwareConfig
from dflash_train.planning import machine, preflight
from dflash_train.planning.machine import Gpu

A6000 = Gpu("NVIDIA RTX A6000", 51_033_931_776, "8.6")
STRANGER = Gpu("NVIDIA L40S", 47_697_362_944, "8.9")
NAMES = ("a6000x2", "rtx_pro_6000", "rtx_3090", "rtx_4090", "rtx_5090", "a100", "h100", "h200")


def test_every_profile_says_all_that_plan_reckons_with():
    found = {profile.name: profile for profile in plan.profiles()}
    assert sorted(found) == sorted(NAMES)
    optional = {"num_threads", "upload_bytes_per_s"}
    for name, profile in found.items():
        missing = [key for key, value in vars(profile).items() if value is None and key not in optional]
        assert not missing, (name, missing)
        assert profile.rates in ("measured", "data sheet") and profile.device == "cuda"
        assert profile.flash_attention == (3 if profile.compute_capability == "9.0" else 2)
        assert profile.fp8 == (float(profile.compute_capability) >= 8.9)
        assert (cli.CONF_DIR / "hardware" / f"{name}.yaml").exists()


def test_two_a6000_are_as_described():
    hardware = build_plan("hardware=a6000x2").hardware
    assert hardware.num_gpus == 2 and hardware.compute_capability == "8.6"
    assert hardware.flash_attention == 2 and hardware.fp8 is False
    assert 47e9 < hardware.memory_bytes < 52e9
    assert build_plan("hardware=a6000x2", "hardware.num_gpus=4").hardware.num_gpus == 4


def test_detection_takes_the_profile_of_the_gpus_whole_name_and_measures_count_and_memory():
    found = machine.detect(HardwareConfig(), plan.profiles(), [A6000] * 4)
    assert (found.name, found.num_gpus, found.memory_bytes) == ("a6000x2", 4, A6000.memory_bytes)
    assert found.bandwidth == 7.68e11
    for name in ("NVIDIA RTX A6000 Laptop GPU", "NVIDIA RTX 6000 Ada Generation", "NVIDIA A100-SXM4-40GB",
                 "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 NVL"):  # fmt: skip
        other = machine.detect(HardwareConfig(), plan.profiles(), [replace(A6000, name=name)])
        assert other.bandwidth is None and name in other.name


def test_an_unknown_gpu_is_planned_from_its_measured_memory_with_rates_unknown(capsys):
    found = machine.detect(HardwareConfig(), plan.profiles(), [STRANGER])
    assert found.memory_bytes == STRANGER.memory_bytes and found.compute_capability == "8.9"
    assert found.bandwidth is found.bf16_flops is found.usd_per_gpu_hour is None
    plan.say_machine(found)
    text = capsys.readouterr().out
    assert "NVIDIA L40S" in text and "hardware.bandwidth, hardware.bf16_flops" in text


def test_mixed_gpus_count_as_the_smallest_and_have_no_profile():
    found = machine.detect(HardwareConfig(), plan.profiles(), [A6000, STRANGER])
    assert found.num_gpus == 2 and found.memory_bytes == STRANGER.memory_bytes and found.bandwidth is None


def test_what_is_given_by_hand_outranks_what_is_measured():
    given = HardwareConfig(num_gpus=1, bandwidth=1e12)
    found = machine.detect(given, plan.profiles(), [A6000] * 2)
    assert found.num_gpus == 1 and found.bandwidth == 1e12 and found.bf16_flops == 1.548e14


def test_without_a_gpu_the_hosts_memory_counts():
    found = machine.detect(HardwareConfig(), plan.profiles(), [])
    assert found.name == "cpu" and found.num_gpus == 0 and found.reserve_bytes == 0
    assert found.memory_bytes == psutil.virtual_memory().total
    assert plan.pick_machine(build_plan("hardware=cpu").hardware).memory_bytes == found.memory_bytes


@pytest.mark.parametrize(
    "gpus, words",
    [
        ([A6000, A6000], None),
        ([A6000] * 4, None),
        ([A6000], "2x NVIDIA RTX A6000, this machine has 1x NVIDIA RTX A6000"),
        ([STRANGER] * 2, "2x NVIDIA RTX A6000, this machine has 2x NVIDIA L40S"),
        ([A6000, STRANGER], "1x NVIDIA L40S"),
    ],
)
def test_a_stage_refuses_a_profile_of_another_machine(monkeypatch, gpus, words):
    """Everything `plan` said was about the profile's machine."""
    monkeypatch.setattr(preflight, "cuda_problem", lambda: None)
    monkeypatch.setattr(preflight, "gpus_at_hand", lambda: gpus)
    check = plan.check_device(build_plan("hardware=a6000x2"))
    assert check.ok == (words is None)
    if words:
        assert words in check.detail and "hardware=auto" in check.fix
    assert plan.check_device(build_plan("hardware=auto")).ok


def test_a_process_alone_counts_the_memory_of_all_gpus_and_a_rank_that_of_its_own(monkeypatch):
    """A target that is spread must not be refused for the size of one card."""
    monkeypatch.setattr(preflight, "cuda_problem", lambda: None)
    monkeypatch.setattr(preflight, "gpus_at_hand", lambda: [A6000, STRANGER])
    run = build_plan("hardware=auto")
    monkeypatch.setattr(preflight, "world_size", lambda: 1)
    assert plan.check_gpu_memory(run, 54_000_000_000, "")[0].ok
    monkeypatch.setattr(preflight, "world_size", lambda: 2)
    monkeypatch.setattr(preflight, "local_rank", lambda: 1)
    (check,) = plan.check_gpu_memory(run, 54_000_000_000, "")
    assert not check.ok and "47.7 GB on 1x NVIDIA L40S" in check.detail
    assert plan.check_gpu_memory(build_plan("hardware=cpu"), 1, "") == []


def test_a_profile_with_gpus_is_refused_where_there_are_none(monkeypatch):
    monkeypatch.setattr(preflight, "cuda_problem", lambda: "no GPU found")
    check = plan.check_device(build_plan("hardware=h200"))
    assert not check.ok and check.fix == "hardware=cpu" and "no GPU found" in check.detail
    assert plan.check_device(build_plan("hardware=auto")).ok and plan.check_device(build_plan("hardware=cpu")).ok


def test_impossible_values_are_refused_by_their_key():
    for word in ("hardware.bandwidth=-1", "hardware.memory_bytes=0", "hardware.num_gpus=-1", "assume.train_mfu=1.5"):
        with pytest.raises(Exception, match=word.split("=")[0]):
            build_plan(word)
