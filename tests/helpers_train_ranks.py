"""What several gloo ranks run in one go: `python tests/helpers_train_ranks.py <scenario> <folder>`; rank 0 writes
<folder>/<scenario>.json. Starting torch and DeepSpeed costs seconds, so one start serves many scenarios."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import helpers_train

from dflash_train import train as stage
from dflash_train.config import TrainConfig, ZeroConfig
from dflash_train.engine import zero
from dflash_train.store.loader import ShardCache
from dflash_train.util import dist
from dflash_train.util.errors import UserError

STEPS, ROWS, LR, CPU = 4, 8, 1e-2, torch.device("cpu")


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


def run_training(folder: Path, **values) -> str | None:
    """A whole training on this rank's process; None, or the message of the error it ended with."""
    run = helpers_train.build_run(folder, **values)
    try:
        stage.Trainer(run, stage.check(run), CPU).train()
    except UserError as error:
        return str(error)
    return None


def scenario_toy(folder: Path) -> dict:
    return {f"{stage}-{accumulation}": run_toy(stage, accumulation) for stage in (1, 2, 3) for accumulation in (1, 4)}


def scenario_train(folder: Path) -> dict:
    """The same global batches on all ranks, per stage; then one rank that cannot read a shard."""
    out = {}
    for number in (1, 3):
        output = str(folder / f"out{number}")
        error = run_training(folder, **{"zero": f"zero{number}", "train.output_dir": output, "train.micro_batch": 1,
                                        "train.eval_samples": 3})  # fmt: skip
        out[f"stage{number}"] = error
    get = ShardCache.get

    def unreadable(cache, marker):
        if dist.rank() == 1 and marker.shard_id == "train-00001":
            raise UserError(marker.key, got="unreadable on this machine")
        return get(cache, marker)

    ShardCache.get = unreadable
    error = run_training(folder, **{"train.output_dir": str(folder / "bad"), "train.micro_batch": 1})
    Path(folder, f"error-{dist.rank()}.txt").write_text(error or "no error")
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder = sys.argv[1], Path(sys.argv[2])
    zero.start(CPU)
    result = {"toy": scenario_toy, "train": scenario_train}[name](folder)
    if dist.is_main():
        (folder / f"{name}.json").write_text(json.dumps(result))
    dist.shutdown()
