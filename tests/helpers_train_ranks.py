"""What several gloo ranks run in one go: `deepspeed --num_gpus 2 tests/helpers_train_ranks.py <folder>`; rank 0 writes
<folder>/results.json. Starting torch and DeepSpeed costs seconds, so one start serves all. The toy serves alone too.

With a word of KILLS before the folder: one training into folder/<word>, in which a rank is killed there."""

import errno
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import helpers_train

from dflash_train import train as stage
from dflash_train.config import TrainConfig, ZeroConfig
from dflash_train.drafter import files
from dflash_train.engine import state_files, zero
from dflash_train.store.loader import ShardCache
from dflash_train.util import dist
from dflash_train.util.errors import UserError

STEPS, ROWS, LR, CPU = 4, 8, 1e-2, torch.device("cpu")
DRILL = {"train.epochs": 5, "train.eval_samples": 3}  # 7 steps


class Toy(nn.Module):
    """Two matrices and a vector."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        draw = lambda *shape: nn.Parameter(0.15 * torch.randn(*shape, generator=generator))
        self.first, self.gain, self.second = draw(16, 8), nn.Parameter(torch.linspace(0.5, 2, 16)), draw(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.dtype)
        return torch.tanh(x @ self.first.T) * self.gain @ self.second.T


def toy_data() -> tuple[Tensor, Tensor, Tensor]:
    """inputs [STEPS,ROWS,8], targets [..,4], weights [STEPS,ROWS]: rows 2 and 3 of each step have none."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(STEPS, ROWS, generator=generator) * 3
    weights[:, 2:4] = 0
    return (torch.randn(STEPS, ROWS, 8, generator=generator), torch.randn(STEPS, ROWS, 4, generator=generator), weights)


def toy_settings(**changes) -> TrainConfig:
    return TrainConfig(**({"global_batch": ROWS, "lr": LR, "weight_decay": 0.1, "clip": 0.05, "dtype": "float32",
                           "output_dir": "x"} | changes))  # fmt: skip


def numerator(output: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (((output.float() - targets) ** 2).sum(-1) * weights).sum()


def run_toy(stage_number: int, accumulation: int, **changes) -> dict:
    """Train the toy inside DeepSpeed; losses, gradient norms and final weights."""
    rank, world = dist.rank(), dist.world_size()
    settings = toy_settings(micro_batch=ROWS // accumulation // world, **changes)
    engine = zero.ZeroEngine(Toy(), settings, ZeroConfig(stage_number), accumulation, CPU)
    inputs, targets, weights = toy_data()
    losses, norms = [], []
    for step in range(STEPS):
        denominator, total = float(weights[step].sum()), 0.0
        engine.set_learning_rate(LR / (step + 1))
        for k in range(accumulation):
            first = (k * world + rank) * settings.micro_batch
            mine = step, slice(first, first + settings.micro_batch)
            loss = numerator(engine(inputs[mine]), targets[mine], weights[mine])
            engine.backward(loss, denominator)
            total += loss.item()
        losses.append(dist.all_reduce_sum([total])[0] / denominator)
        norms.append(engine.gradient_norm())
    state = engine.gathered_state_dict()
    shapes = {name: list(p.shape) for name, p in engine.engine.module.named_parameters()}
    return {"losses": losses, "norms": norms, "shapes": shapes,
            "weights": {name: t.float().tolist() for name, t in state.items()} if state else None}  # fmt: skip


def run_plain() -> dict:
    """The same training in plain torch: all rows at once, mean over the window's weights, one AdamW."""
    model, settings = Toy(), toy_settings()
    groups = [{"params": [model.first, model.second], "weight_decay": settings.weight_decay},
              {"params": [model.gain], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2))
    inputs, targets, weights = toy_data()
    losses, norms = [], []
    for step in range(STEPS):
        loss = numerator(model(inputs[step]), targets[step], weights[step]) / weights[step].sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)))
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def assert_equal(got: dict, plain: dict) -> None:
    assert got["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert min(plain["norms"]) > 2 * toy_settings().clip  # clipping is at work
    assert set(got["weights"]) == set(plain["weights"])
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(torch.tensor(got["weights"][name]), weight, rtol=1e-6, atol=1e-6)


def run_training(folder: Path, **values) -> str | None:
    """A whole training on this rank; None, or the message of the error it ended with."""
    try:
        helpers_train.run_here(folder, **values)
    except UserError as error:
        return str(error)
    return None


def toys() -> dict:
    return {f"{number}-{parts}": run_toy(number, parts) for number in (1, 2, 3) for parts in (1, 4)}


def run_failing(folder: Path, name: str, **values) -> None:
    """A training into folder/name that should end with an error, kept as <name>-error-<rank>.txt."""
    error = run_training(folder, **{"train.output_dir": folder / name, "train.micro_batch": 1}, **values)
    Path(folder, f"{name}-error-{dist.rank()}.txt").write_text(error or "no error")


def full_disk(part: str, write):
    """`write(tensors, path)`, but a path with `part` in it stops half way: no space is left."""

    def write_or_fail(tensors, path, *args, **kwargs):
        write(tensors, path, *args, **kwargs)
        if part in str(path):
            os.truncate(path, Path(path).stat().st_size // 2)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    return write_or_fail


def full_disks(folder: Path) -> None:
    """Rank 0 cannot write the second checkpoint's masters at stages 1 and 3; nor best/."""
    settings = {"train.save_every": 1, "train.max_steps": 3, "train.eval_samples": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "save_file", full_disk(".step-000002.tmp/training/", state_files.save_file))
        for number in (1, 3):
            run_failing(folder, f"full{number}", **settings, zero=f"zero{number}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "save_file", full_disk(".best.tmp/", files.save_file))
        run_failing(folder, "full_best", **settings)


def at_step(number: int, rank: int, act):
    """train_window, but `act(engine)` comes first in the window of that number (from 1) on that rank."""
    inner, count = stage.train_window, [0]

    def train_window(engine, *args):
        count[0] += 1
        if count[0] == number and dist.rank() == rank:
            act(engine)
        return inner(engine, *args)

    return train_window


def interrupt(engine: zero.ZeroEngine) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def moved(folder: Path) -> dict:
    """to_one: stopped here after step 3, to go on with one rank. to_two: stopped before by one rank, goes on here."""
    settings = {"train.micro_batch": 1, **DRILL}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "train_window", at_step(3, 1, interrupt))
        to_one = run_training(folder, zero="zero3", **settings, **{"train.output_dir": folder / "to_one" / "out"})
    to_two = run_training(folder, zero="zero2", **settings, **{"train.output_dir": folder / "to_two" / "out"})
    return {"to_one": to_one, "to_two": to_two}


def kill_in_the_backward_pass(patch: pytest.MonkeyPatch) -> None:
    """Rank 1, in step 4: the other one is in a collective then."""

    def arm(engine):
        engine.backward = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(stage, "train_window", at_step(4, 1, arm))


def kill_while_writing(patch: pytest.MonkeyPatch) -> None:
    """Rank 0, when half of the checkpoint of step 4 is written."""
    write = state_files.save_file

    def write_and_die(tensors, path):
        write(tensors, path)
        if "step-000004" in path:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(state_files, "save_file", write_and_die)


KILLS = {"killed_in_a_step": kill_in_the_backward_pass, "killed_while_writing": kill_while_writing}


def run_killed(folder: Path, name: str) -> None:
    """A training that saves every second step, until a rank is killed."""
    with pytest.MonkeyPatch.context() as patch:
        KILLS[name](patch)
        run_training(folder, zero="zero2", **{"train.output_dir": folder / name / "out", "train.micro_batch": 1,
                                              "train.save_every": 2, **DRILL})  # fmt: skip


def trainings(folder: Path) -> dict:
    """The same global batches on all ranks, at stages 1 and 3; then ranks that cannot write or read a file."""
    out = {}
    for number in (1, 3):
        out[f"stage{number}"] = run_training(folder, **{
            "zero": f"zero{number}", "train.output_dir": folder / f"stage{number}" / "out", "train.micro_batch": 1,
            **DRILL})  # fmt: skip
    full_disks(folder)
    get = ShardCache.get

    def unreadable(cache, marker):
        if dist.rank() == 1 and marker.shard_id == "train-00001":
            raise UserError(marker.key, got="unreadable on this machine")
        return get(cache, marker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardCache, "get", unreadable)
        run_failing(folder, "unreadable")
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[-1])  # the launcher puts its --local_rank before it
    zero.start(CPU)
    if sys.argv[-2] in KILLS:
        run_killed(folder, sys.argv[-2])
    else:
        result = {"toys": toys(), "trainings": trainings(folder), "moved": moved(folder)}
        if dist.is_main():
            (folder / "results.json").write_text(json.dumps(result))
    dist.shutdown()
