"""`benchmarks/drafter_step.py` runs whole at tiny shapes, and counts the work of a block as its docstring says."""

import math
import sys

import pytest
import torch

from dflash_train import cli

sys.path.insert(0, str(cli.ROOT / "benchmarks"))
import drafter_step


def test_the_tiny_run_prints_a_row_for_each_block_size(capsys):
    drafter_step.main(["--tiny", "--steps", "3", "--warmup", "1"])
    shown = capsys.readouterr().out.splitlines()
    header, line, *rows = shown[-4:]
    assert header.count("|") == line.count("|") == rows[0].count("|") == len(drafter_step.COLUMNS) + 1
    for row, block_size, tokens in zip(rows, (16, 8), (96, 128)):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == f"B={block_size}, 12 valid anchors, {tokens} tokens, float32, 3 steps"
        ms, blocks_per_s = float(cells[3].split()[0]), float(cells[4].replace(",", ""))
        assert blocks_per_s == pytest.approx(12 / ms * 1000, rel=0.02)
    losses = [float(text.split("loss ")[1].split(",")[0]) for text in shown if "loss " in text]
    assert len(losses) == 2 and all(loss == pytest.approx(math.log(128), rel=0.1) for loss in losses)


@pytest.mark.parametrize("block_size, row_tokens, gflop", [(16, 3072, 230), (8, 4096, 112)])
def test_the_true_shapes_are_the_published_drafters_and_its_useful_work(block_size, row_tokens, gflop):
    run = drafter_step.build_run(block_size, row_tokens, tiny=False)
    assert drafter_step.inputs.num_parameters(run.drafter) == 1_730_213_120
    assert run.drafter.block_size == block_size and run.train.num_anchors == 512 and run.train.dtype == "bfloat16"
    assert drafter_step.block_flops(run.drafter) / 1e9 == pytest.approx(gflop, abs=0.5)


def test_each_step_draws_other_anchors_in_the_same_row():
    run = drafter_step.build_run(8, 128, tiny=True)
    shard = drafter_step.random_shard(run.drafter, 128, torch.float32)
    batches = drafter_step.read_rows(shard, 128, pin=False)
    (first, one), (second, two) = next(batches), next(batches)
    assert one is two and [first[0].epoch, second[0].epoch] == [0, 1]
    assert one.document_ids.unique().tolist() == [0, 1, 2] and one.loss_mask.sum() == 128 - 10 - 10 - 11


def test_without_a_gpu_the_true_shapes_are_refused(monkeypatch):
    monkeypatch.setattr("dflash_train.util.device.cuda_problem", lambda: "no GPU found")
    with pytest.raises(drafter_step.UserError, match="no GPU found"):
        drafter_step.main([])
