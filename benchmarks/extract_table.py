"""What extract_27b.py measured as one Markdown table, and what of it misses its aim."""

from collections.abc import Iterator

from dflash_train.util.io import human_bytes

AIM_TOKENS_PER_S, AIM_TIMES_NAIVE = 12_000, 20
HEAD = ["part", "tokens/s", "samples/s", "of the matrix rate", "GPU idle", "padding", "paused", "peak", "beside"]
RATES = ("ours", "batch", "worker", "plain", "naive", "split")
"""Kinds of parts that have a rate; a part is named '<kind> <lengths> <what else>'."""


def markdown(figures: dict, failed: dict[str, str]) -> str:
    """The table, then lines on what is not a rate."""
    rows = [_row(name, part, figures) for name, part in figures.items() if name.split()[0] in RATES and _has_rate(part)]
    lines = [*_machine(figures), "", *_table(rows), "", *_lines(figures)]
    lines += [f"FAILED {name}: {reason}" for name, reason in failed.items()]
    return "\n".join([*lines, *aims(figures), *wrong(figures)])


def wrong(figures: dict) -> list[str]:
    """Every shard that was lost or came twice, in words; empty when all is well."""
    keys = ("lost_shards", "duplicated_shards", "wrong_samples")
    return [f"WRONG {name}: {key} {part[key]}" for name, part in figures.items() for key in keys if part.get(key)]


def aims(figures: dict) -> list[str]:
    """What was aimed at, and what came out."""
    said = []
    for name, part in figures.items():
        if name.startswith(("ours b", "ours c")):
            said.append(_aim(name, part["tokens_per_s"], AIM_TOKENS_PER_S, "tokens/s"))
    if "ours a bfloat16" in figures and "naive a" in figures:
        times = figures["ours a bfloat16"]["tokens_per_s"] / figures["naive a"]["tokens_per_s"]
        said.append(_aim("ours a", times, AIM_TIMES_NAIVE, "times naive"))
    return said


def _aim(name: str, got: float, want: float, unit: str) -> str:
    return f"aim {'reached' if got >= want else 'MISSED'}, {name}: {got:,.0f} of {want:,} {unit}"


def _table(rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]


def _has_rate(part: dict) -> bool:
    return "tokens_per_s" in part


def _row(name: str, part: dict, figures: dict) -> list[str]:
    rate, machine = part["tokens_per_s"], figures.get("machine")
    tflops = rate * figures["build"]["flops_per_token"] / 1e12 / part.get("gpus", 1)
    idle = figures.get(name.replace(name.split()[0], "idle", 1))
    percent = lambda value: "" if value is None else f"{value:.1%}"
    lengths, dtype = name.split()[1], name.split()[2] if len(name.split()) > 2 else "bfloat16"
    beside = []
    for other in (f"plain {lengths}", f"naive {lengths}", f"ours {lengths} {dtype}"):
        if other in figures and other != name and name.split()[0] not in ("plain", "naive"):
            beside.append(f"{rate / figures[other]['tokens_per_s']:.2f}x {other}")
    return [
        name, f"{rate:,.0f}", f"{part['samples_per_s']:,.1f}",
        f"{tflops / machine['matrix_tflops']:.3f}" if machine else "", percent(idle and idle["idle_share"]),
        percent(part.get("padding_waste")), percent(part.get("paused_share")),
        human_bytes(part["peak_bytes"]) if part.get("peak_bytes") else "", "; ".join(beside),
    ]  # fmt: skip


def _machine(figures: dict) -> Iterator[str]:
    if "machine" not in figures:
        return
    machine, last = figures["machine"], figures.get("machine again", {})
    void = " VOID: no rate below counts." if machine["void"] or last.get("void") else ""
    again = f", {last['matrix_tflops']:.3g} at the end" if last else ""
    where = f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}, {machine['code']}"
    rates = f"matrix rate {machine['matrix_tflops']:.3g} TFLOP/s{again}; copy {machine['copy_tb_s']:.3g} TB/s"
    yield f"{where}: {rates}.{void}"


def _lines(figures: dict) -> Iterator[str]:
    if "build" in figures:
        build, warm_ups = figures["build"], [part["warm_up_s"] for part in figures.values() if "warm_up_s" in part]
        yield (f"built in {build['build_s']:.1f} s: {human_bytes(build['weight_bytes'])}, "
               f"{build['flops_per_token'] / 1e9:.1f} GFLOP a token")  # fmt: skip
        yield f"compiling and tuning before each part, not counted: {', '.join(f'{s:.0f}' for s in warm_ups)} s"
    for name, part in figures.items():
        for what, layers in part.get("agreement", {}).items():
            errors = "; ".join(f"{layer} {e['cosine']:.6f}, {e['largest']:.1e}" for layer, e in layers.items())
            yield f"{name}, {what} (cosine, largest relative error of a row): {errors}"
