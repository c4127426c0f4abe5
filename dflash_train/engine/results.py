"""What a run leaves for others: best/ and last/ as z-lab folders, and its summary."""

import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from dflash_train.config import DrafterConfig
from dflash_train.drafter.files import save_drafter
from dflash_train.engine.zero import ZeroEngine
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
            self.write_folder("best", step, engine.gathered_state_dict())

    def write_drafter(self, folder: Path, step: int, weights: dict[str, Tensor]) -> None:
        save_drafter(folder, weights, self.config, self.record(step, self.heldout))

    def write_folder(self, name: str, step: int, weights: dict[str, Tensor] | None) -> None:
        """output_dir/<name>, replaced when the new one is whole. weights: None on all ranks but 0, which writes."""
        if weights is None:
            return
        temporary, folder = self.output_dir / f".{name}.tmp", self.output_dir / name
        shutil.rmtree(temporary, ignore_errors=True)
        self.write_drafter(temporary, step, weights)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

    def finish(self, step: int, engine: ZeroEngine) -> None:
        """last/, and best/ where there was nothing to choose by. A collective."""
        weights = engine.gathered_state_dict()
        self.write_folder("last", step, weights)
        if not self.best:
            self.write_folder("best", step, weights)

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
