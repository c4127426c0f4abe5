"""What a run will take on a machine, before a GPU is touched: memory, time of a round, terabytes, hours, money.

    python -m dflash_train.plan hardware=a6000x2

Needs no download: a target's sizes are in its YAML, or in the config.json of files at hand. The checks that every
stage makes first (`preflight` and its parts) are offered here too.
"""

import os
from dataclasses import replace

from omegaconf import OmegaConf

from dflash_train import cli
from dflash_train.config import DrafterConfig, HardwareConfig, PlanRun, TargetConfig
from dflash_train.drafter.resolve import resolve_drafter
from dflash_train.planning import cost, fit, machine, tables
from dflash_train.planning.memory import ITEM_BYTES
from dflash_train.planning.preflight import (
    check_device,
    check_disk,
    check_file,
    check_gpu_memory,
    check_memory,
    check_store,
    preflight,
)
from dflash_train.planning.shapes import (
    TargetSizes,
    drafter_parameters,
    sizes_from_files,
    target_parameters,
    target_sizes,
)
from dflash_train.store import STORES, budget
from dflash_train.target.base import default_layer_ids
from dflash_train.util.checks import Check
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, read_json
from dflash_train.util.log import say, table

__all__ = [
    "Check", "check_device", "check_disk", "check_file", "check_gpu_memory", "check_memory", "check_store", "main",
    "preflight",
]  # fmt: skip


def main(run: PlanRun) -> None:
    """Print what the run will take."""
    run = replace(run, hardware=pick_machine(run.hardware), target=known_sizes(run.target))
    say_machine(run.hardware)
    sizes, unknown = target_sizes(run.target)
    if sizes is None:
        say(f"target {run.target.name}: its parameters, memory and time are unknown until these are given, or "
            f"target.path is a folder with a config.json: {', '.join(unknown)}")  # fmt: skip
        if run.target.hidden_size:
            show_storage(run, run.target.hidden_size, len(run.extract.layer_ids or range(run.extract.num_taps)))
    else:
        run = replace(run, drafter=resolved_drafter(run, sizes))
        say_models(run, sizes)
        fits = show_memory(run, sizes)
        show_rounds(run, sizes)
        show_work(run, sizes, fits)
        show_storage(run, sizes.hidden_size, len(run.drafter.target_layer_ids))
    if not run.dry_run:
        say("next: " + cli.next_command("mix", run))


# ---------------------------------------------------------------- what is planned for


def profiles() -> list[HardwareConfig]:
    """Every machine of conf/hardware that names a GPU."""
    base = OmegaConf.load(cli.CONF_DIR / "hardware" / "base.yaml")
    found = []
    for path in sorted((cli.CONF_DIR / "hardware").glob("*.yaml")):
        own = OmegaConf.load(path)
        if path.stem != "base" and own.get("gpu"):
            own.pop("defaults")
            found.append(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HardwareConfig), base, own)))
    return found


def pick_machine(hardware: HardwareConfig) -> HardwareConfig:
    """hardware=auto becomes the machine at hand; a profile stays as it is, whatever runs here."""
    if hardware.device == "cpu":
        return machine.with_host_memory(replace(hardware, num_gpus=0))
    if hardware.name != "auto":
        return hardware
    return machine.detect(hardware, profiles(), machine.gpus_at_hand())


def known_sizes(target: TargetConfig) -> TargetConfig:
    """With what a config.json at hand says; a target that is only a name on the hub stays as its YAML has it."""
    path = os.path.expanduser(target.path or "")
    if not path or not os.path.isfile(os.path.join(path, "config.json")):
        return target
    from dflash_train.target.files import read_config  # here: every stage imports this file, few need transformers

    return sizes_from_files(target, read_config(target).get_text_config().to_dict())


def resolved_drafter(run: PlanRun, sizes: TargetSizes) -> DrafterConfig:
    """With every null taken from the target. Raises UserError for a drafter made for another one."""
    taps = run.extract.layer_ids or run.drafter.target_layer_ids
    taps = taps or default_layer_ids(sizes.num_layers, run.extract.num_taps)
    mask = run.target.mask_token_id
    if mask is None:
        mask = run.drafter.mask_token_id or 0  # no size follows from it
    shape = sizes.shape
    text = {
        "hidden_size": sizes.hidden_size, "vocab_size": sizes.vocab_size, "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size or None, "rope_theta": 1.0,  # nor from this
        "max_position_embeddings": run.target.max_context or run.context,
    }  # fmt: skip
    return resolve_drafter(run.drafter, text, taps, mask)


# ---------------------------------------------------------------- what is said


def say_machine(hardware: HardwareConfig) -> None:
    show = lambda value, text: "unknown" if value is None else text(value)
    count = f"{hardware.num_gpus or 1}x " if hardware.num_gpus != 0 else ""
    features = [f"SM {hardware.compute_capability}"] if hardware.compute_capability else []
    features += [f"FlashAttention {hardware.flash_attention}"] if hardware.flash_attention else []
    features += ["fp8" if hardware.fp8 else "no fp8"] if hardware.fp8 is not None else []
    features += [hardware.interconnect] if hardware.interconnect and hardware.num_gpus != 1 else []
    say(f"machine {hardware.name}: {count}{show(hardware.memory_bytes, human_bytes)}, "
        f"bandwidth {show(hardware.bandwidth, lambda v: f'{v / 1e12:.2f} TB/s')}, "
        f"bf16 {show(hardware.bf16_flops, lambda v: f'{v / 1e12:.0f} TFLOP/s')}"
        f"{f' ({hardware.rates})' if hardware.rates else ''}{''.join(f', {name}' for name in features)}")  # fmt: skip
    missing = [f"hardware.{key}" for key in ("memory_bytes", "bandwidth", "bf16_flops") if vars(hardware)[key] is None]
    if missing:
        say(f"  unknown, so what follows from it is too: {', '.join(missing)}; give them, or hardware=<profile>")


def say_models(run: PlanRun, sizes: TargetSizes) -> None:
    """One line each. Raises UserError when the YAML's count of parameters is not what its layers have."""
    count, told = target_parameters(sizes), run.target.num_parameters
    if told is not None and told != count:
        raise UserError("target.num_parameters", got=f"{told:,}", want=f"{count:,}, as the target's shape gives it",
                        fix=f"target.num_parameters={count}, or correct target.shape")  # fmt: skip
    linear = sizes.shape.num_linear_layers
    layers = f"{sizes.num_layers} layers" + (f" ({linear} Gated DeltaNet, {sizes.num_full_layers} full)" * bool(linear))
    say(f"target {run.target.name}: {count:,} parameters, {human_bytes(count * ITEM_BYTES[run.target.dtype])} as "
        f"{run.target.dtype}; {layers}")  # fmt: skip
    own = sum(drafter_parameters(run.drafter).values())
    say(f"drafter {run.drafter.name}: {own:,} parameters, {human_bytes(own * 2)} as bfloat16; {run.drafter.num_layers} "
        f"layers, B={run.drafter.block_size}, taps {run.drafter.target_layer_ids}")  # fmt: skip


def show_memory(run: PlanRun, sizes: TargetSizes) -> list[fit.Fit]:
    """The table, and what to type where something does not fit."""
    problem, hardware = fit.Problem(run, sizes), run.hardware
    fits = fit.all_fits(run, sizes)
    usable = "unknown" if problem.usable is None else f"{problem.usable / 1e9:.1f}"
    where = "in memory" if hardware.num_gpus == 0 else "per GPU"
    spread = f"; target over {problem.gpus_per_copy} GPUs" * (problem.gpus_per_copy > 1)
    table(f"memory: GB {where}, {usable} usable{spread}; eval at context {run.context:,}, tree {run.budget}",
          tables.memory_columns(), tables.memory_rows(fits))  # fmt: skip
    for line in tables.fix_lines(fits):
        say(line)
    say("offload: what DeepSpeed would leave on the GPU with the optimizer on the host; no key of this version sets it")
    return fits


def show_rounds(run: PlanRun, sizes: TargetSizes) -> None:
    problem = fit.Problem(run, sizes)
    found = tables.rounds(run, problem)
    if found is None:
        say("time of a round: unknown until hardware.bandwidth and hardware.bf16_flops are given")
        return
    ways = problem.gpus_per_copy
    columns, rows = tables.round_table(found, ways)
    table(f"a round at context {run.context:,}, at best (bandwidth, FLOPs), and its speedup by acceptance length",
          columns, rows)  # fmt: skip
    if ways > 1:
        say(f"verify: layers spread over {ways} GPUs, as this version does; TP {ways}: all of them at once, from which "
            "the speedups are")  # fmt: skip
    launch_ms = 1000 * run.assume.launch_s_per_layer * sizes.num_layers
    say(f"until the target runs under CUDA graphs a pass takes up to {launch_ms:.0f} ms, whatever it verifies "
        "(assume.launch_s_per_layer)")  # fmt: skip


def show_work(run: PlanRun, sizes: TargetSizes, fits: list[fit.Fit]) -> None:
    """Hours and money of the three stages that take them; train at the chosen ZeRO stage."""
    samples, why = planned_samples(run)
    if samples is None:
        say(f"hours and cost: {why}; samples=N would tell")
        return
    per_token = budget.row_bytes(sizes.hidden_size, len(run.drafter.target_layer_ids), run.store)
    total = int(per_token * samples * run.tokens_per_sample)
    found = tables.works(run, sizes, samples, per_token)
    zero = f"train zero{run.zero.stage}"
    too_large = {"train" if row.name == zero else row.name for row in fits if row.fits is False}
    devices = max(1, run.hardware.num_gpus or 1)
    table(f"hours on {devices} device(s): {samples:,} samples ({why}), {run.train.epochs:g} epochs",
          ["stage", "work", "rate", "hours", "USD", "store", "bound by"],
          tables.work_rows(run, found, total, per_token, too_large))  # fmt: skip


def show_storage(run: PlanRun, hidden_size: int, num_taps: int) -> None:
    """Terabytes, their price, and whether the store holds them."""
    samples, why = planned_samples(run)
    store = run.store
    per_token = budget.row_bytes(hidden_size, num_taps, store)
    if samples is None:
        say(f"storage: {per_token:,} B a token; {why}; samples=N would tell")
        return
    tokens = int(samples * run.tokens_per_sample)
    total = per_token * tokens
    usd = cost.storage_usd(total, run.assume.usd_per_gb_month, run.assume.months)
    say(budget.storage_line(hidden_size, num_taps, store, samples, tokens))
    say(f"storage: {human_bytes(total)}, {usd:,.0f} USD for {run.assume.months:g} month(s) at "
        f"{run.assume.usd_per_gb_month:g} USD a GB-month")  # fmt: skip
    opened = cli.plugin(STORES, store.kind, "store.kind").open_store(store, run.store_name)
    limit = budget.max_bytes(store, opened, present_bytes=0)
    ways_out = budget.too_much(total, limit)
    say(f"room: {human_bytes(limit[0])} at {opened.url} ({limit[1]}): {'does not fit' if ways_out else 'fits'}")
    if ways_out:
        say(f"  {ways_out}")


def planned_samples(run: PlanRun) -> tuple[int | None, str]:
    """(number of samples, where that number comes from)."""
    if run.samples is not None:
        return run.samples, "samples=..."
    manifest = run.mix_dir / "manifest.json"
    if manifest.exists():
        return read_json(manifest)["rows"]["train"], str(manifest)
    if run.data.total is not None:
        return min(run.data.total, run.limit or run.data.total), "data.total"
    takes = [source.take for source in run.data.sources.values()]
    if takes and None not in takes:
        return min(sum(takes), run.limit or sum(takes)), "the sources' takes"
    return None, "unknown until the mix is made"


if __name__ == "__main__":
    cli.main("plan", main)
