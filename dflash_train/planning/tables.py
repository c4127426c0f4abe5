"""The rows that `plan` prints. Anything unknown is the word, never a guess."""

from dataclasses import dataclass, replace

from dflash_train.config import PlanRun
from dflash_train.planning import cost, speed
from dflash_train.planning.cost import Work
from dflash_train.planning.fit import PARTS, Fit, Problem
from dflash_train.planning.memory import all_drafter_parameters
from dflash_train.planning.shapes import TargetSizes
from dflash_train.planning.speed import Rates
from dflash_train.util.io import human_bytes

ACCEPTANCES = (2, 3, 4, 6, 8)
UNKNOWN = "unknown"


def rates_of(run: PlanRun) -> Rates:
    return Rates(run.hardware.bandwidth, run.hardware.bf16_flops)


def gigabytes(count: int) -> str:
    return "" if not count else f"{count / 1e9:.1f}" if count >= 5e7 else "<0.1"


# ---------------------------------------------------------------- memory


def memory_columns() -> list[str]:
    return ["stage", *PARTS[:5], "optim.", "activ.", "logits", "total", "fits"]


def memory_rows(fits: list[Fit]) -> list[list[str]]:
    rows = []
    for row in fits:
        verdict = UNKNOWN
        if row.usable is not None:
            spare = row.usable - row.total
            verdict = f"yes, {spare / 1e9:.1f} free" if spare >= 0 else f"NO, {-spare / 1e9:.1f} over"
        rows.append([row.name, *(gigabytes(row.parts.get(part, 0)) for part in PARTS), gigabytes(row.total), verdict])
    return rows


def fix_lines(fits: list[Fit]) -> list[str]:
    """What to type where a row says NO."""
    return [f"{row.name} fits with {' or '.join(row.fixes)}" if row.fixes
            else f"{row.name} does not fit with any key: more memory a GPU is needed"
            for row in fits if row.fits is False]  # fmt: skip


# ---------------------------------------------------------------- a round


@dataclass(frozen=True)
class Round:
    """One row of the round table; all times in seconds."""

    label: str
    spread_s: float
    parallel_s: float
    draft_s: float
    autoregressive_s: float

    @property
    def round_s(self) -> float:
        return self.parallel_s + self.draft_s


def rounds(run: PlanRun, problem: Problem) -> list[Round] | None:
    """The chain of the drafter's block and trees of growing budget; None where a rate is unknown."""
    sizes, item, rates = problem.sizes, problem.item, rates_of(run)
    verify = lambda nodes, ways: speed.verify_s(sizes, nodes, run.context, item, rates, ways)
    if verify(1, 1) is None:
        return None
    ways, chain = problem.gpus_per_copy, run.drafter.block_size - 1
    budgets = sorted({16, 32, 64, 128, 256, run.budget})
    rows = [(f"chain {chain}", chain + 1)] + [(f"tree {budget}", budget + 1) for budget in budgets]
    draft = speed.draft_s(run.drafter, run.context, item, rates)
    return [Round(label, verify(nodes, 1), verify(nodes, ways), draft, verify(1, ways)) for label, nodes in rows]


def round_table(found: list[Round], ways: int) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: milliseconds, the acceptance that breaks even, and the best-case speedup at others."""
    parallel = [f"TP {ways}"] if ways > 1 else []
    columns = ["draft", "verify ms", *parallel, "draft ms", "breaks even at", *(f"x at {n}" for n in ACCEPTANCES)]
    rows = []
    for row in found:
        times = [row.spread_s, *([row.parallel_s] if parallel else []), row.draft_s]
        gains = [speed.speedup(n, row.autoregressive_s, row.round_s) for n in ACCEPTANCES]
        rows.append([row.label, *(f"{1000 * t:.1f}" for t in times), f"{row.round_s / row.autoregressive_s:.2f}",
                     *(f"{gain:.2f}" for gain in gains)])  # fmt: skip
    return columns, rows


# ---------------------------------------------------------------- hours and money


def works(run: PlanRun, sizes: TargetSizes, num_samples: int, token_bytes: int) -> dict[str, Work]:
    """The three stages that take GPU-hours, for num_samples samples of tokens_per_sample."""
    problem, assume, rates = Problem(run, sizes), run.assume, rates_of(run)
    tokens = num_samples * run.tokens_per_sample
    answers = max(0.0, run.tokens_per_sample - assume.prompt_tokens)
    launch_s = assume.launch_s_per_layer * sizes.num_layers
    world = problem.world
    return {
        "regenerate": cost.regeneration(
            sizes, num_samples * answers, run.data.answers.batch_size, assume.prompt_tokens + answers / 2,
            problem.item, rates, problem.copies, launch_s),
        "extract": cost.extraction(
            sizes, tokens, max(run.drafter.target_layer_ids), rates, problem.capturing, assume.extract_mfu, token_bytes,
            run.hardware.upload_bytes_per_s),
        "train": cost.training(
            run.drafter, tokens, epochs=run.train.epochs, row_tokens=run.train.row_tokens,
            num_anchors=run.train.num_anchors, mfu=assume.train_mfu, rates=rates, world=world,
            parameters=all_drafter_parameters(run.drafter), stage=run.zero.stage,
            accumulation=max(1, run.train.global_batch // (run.train.micro_batch * world)),
            interconnect_bytes_per_s=run.hardware.interconnect_bytes_per_s),
    }  # fmt: skip


def work_rows(
    run: PlanRun, found: dict[str, Work], total_bytes: int, token_bytes: int, too_large: set[str]
) -> list[list[str]]:  # fmt: skip
    """[stage, work, rate, hours, cost, what it reads or writes, bound by]; a stage of `too_large` has no time."""
    gpus, price = max(1, run.hardware.num_gpus or 1), run.hardware.usd_per_gpu_hour
    rows = []
    for stage, work in found.items():
        if stage in too_large:
            work = replace(work, rate=None, bound_by="does not fit, see above")
        hours, usd = work.hours, work.usd(gpus, price)
        none = "-" if stage in too_large else UNKNOWN
        flow = ""
        if stage == "extract":
            flow = f"{human_bytes(total_bytes)} out" + (f", {human_bytes(work.rate * token_bytes)}/s" if hours else "")
        if stage == "train":
            read = run.train.epochs * total_bytes
            flow = f"{human_bytes(read)} in" + (f", {human_bytes(read / hours / 3600)}/s" if hours else "")
        rows.append([
            stage, f"{work.units:.3g} {work.unit}", f"{work.rate:,.0f}/s" if hours else none,
            f"{hours:,.0f}" if hours else none, "" if usd is None else f"{usd:,.0f}", flow, work.bound_by,
        ])  # fmt: skip
    return rows
