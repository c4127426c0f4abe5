"""What a run leaves for others: best/ and last/ as z-lab folders, and its summary."""

import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from dflash_train.config import DrafterConfig
from dflash_train.drafter.files import save_drafter
from dflash_train.engine.agree import together, writing
from dflash_train.engine.zero import ZeroEngine
from dflash_train.util import dist
from dflash_train.util.log import say


class Results:
    """heldout: the newest held-out figures, best: {"acceptance", "step"} so far. record(step, heldout): provenance."""

    def __init__(self, output_dir: Path, config: DrafterConfig, record: Callable[[int, dict], dict], best: dict):
        self.output_dir, self.config, self.record = output_dir, config, record
        self.best, self.heldout = best, {}

    def note(self, step: int, values: dict, engine: ZeroEngine) -> None:
        """New held-out figures; where acceptance is the best so far, the weights go to best/. A collective."""
        self.heldout = {"step": step, **values}
        say(f"step {step:,}: held-out loss {values['heldout_loss']:.4f}, acceptance length "
            f"{values['heldout_acceptance']:.3f} (walk simulated, {values['heldout_rounds']:,} rounds)")  # fmt: skip
        if values["heldout_acceptance"] > self.best.get("acceptance", 0.0):
            self.best = {"acceptance": values["heldout_acceptance"], "step": step}
            self.write_folders(["best"], step, engine)

    def write_drafter(self, folder: Path, step: int, weights: dict[str, Tensor]) -> None:
        save_drafter(folder, weights, self.config, self.record(step, self.heldout))

    def write_folders(self, names: list[str], step: int, engine: ZeroEngine) -> None:
        """The weights as output_dir/<name>, each replaced when the new one is whole. A collective: rank 0 writes, and
        where it cannot, every rank raises UserError."""
        weights = engine.gathered_state_dict()
        for name in names:
            temporary, folder = self.output_dir / f".{name}.tmp", self.output_dir / name
            with together(engine.device), writing(folder):
                if dist.is_main():
                    shutil.rmtree(temporary, ignore_errors=True)
                    self.write_drafter(temporary, step, weights)
                    shutil.rmtree(folder, ignore_errors=True)
                    temporary.rename(folder)

    def finish(self, step: int, engine: ZeroEngine) -> None:
        """last/, and best/ where there was nothing to choose by. A collective."""
        self.write_folders(["last"] if self.best else ["last", "best"], step, engine)

    def summary(self) -> list[list[str]]:
        rows, heldout = [], self.heldout
        if heldout:
            by_slot = "  ".join(f"{accuracy:.3f}" for accuracy in heldout["heldout_accuracy"])
            rows += [["held-out loss", f"{heldout['heldout_loss']:.4f}"],
                     ["held-out acceptance length, pooled", f"{heldout['heldout_acceptance']:.3f}"],
                     ["held-out acceptance length, macro", f"{heldout['heldout_acceptance_macro']:.3f}"],
                     ["held-out accuracy by slot", by_slot]]  # fmt: skip
        if self.best:
            rows.append(["best acceptance length", f"{self.best['acceptance']:.3f} at step {self.best['step']:,}"])
        return [*rows, ["drafter", str(self.output_dir / "best")]]
