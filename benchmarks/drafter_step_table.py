"""What drafter_step.py measured as one Markdown table, and what of it misses its aim."""

from collections.abc import Iterator

AIM_FRACTION, AIM_TIMES, AIM_PEAK_GIB = 0.70, 1.3, 80
HEAD = ["part", "ms [min, max]", "blocks/s", "fraction", "peak, GiB", "times specforge", "steps", "to compile, s"]


def markdown(figures: dict, failed: dict[str, str]) -> str:
    """The table, then lines on what is no time."""
    rows = [_row(name, part, figures) for name, part in figures.items() if "ms" in part]
    lines = [*_rates(figures), "", *(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)), ""]
    lines += [*_profile(figures), *aims(figures), *wrong(figures)]
    return "\n".join([*lines, *(f"FAILED {name}: {reason}" for name, reason in failed.items())])


def fraction(part: dict, figures: dict) -> float | None:
    """Useful work over the time and over the run's matrix rate."""
    if "rate" not in figures:
        return None
    return part["blocks"] * part["block_flops"] / (part["ms"] * 1e-3) / (figures["rate"]["best_tflops"] * 1e12)


def times_specforge(name: str, part: dict, figures: dict) -> float | None:
    """How many times the blocks a second that specforge makes of the same work."""
    kind, size = name.split()[:2]
    other = figures.get(f"{kind} {size} specforge")
    if other is None or other is part or part["block_flops"] != other["block_flops"]:
        return None
    return part["blocks"] / part["ms"] / (other["blocks"] / other["ms"])


def wrong(figures: dict) -> list[str]:
    """Parts in which something was compiled during timed steps, and a rate below what the card gives."""
    said = [f"WRONG {name}: {part['new_graphs']} graphs compiled during timed steps" for name, part in figures.items()
            if part.get("new_graphs")]  # fmt: skip
    if figures.get("rate", {}).get("void"):
        said.append("VOID: the matrix rate is below what this card gives; no fraction counts")
    return said


def aims(figures: dict) -> list[str]:
    """What was aimed at, and what came out."""
    said, ours, optimizer = [], figures.get("step B=16 ours"), figures.get("optimizer B=16 ours, ZeRO-2")
    verdict = lambda good: "reached" if good else "MISSED"
    if ours and "rate" in figures:
        got = fraction(ours, figures)
        said.append(f"aim {verdict(got >= AIM_FRACTION)}: {got:.3f} of the matrix rate, want {AIM_FRACTION}")
    times = ours and times_specforge("step B=16 ours", ours, figures)
    if times:
        said.append(f"aim {verdict(times >= AIM_TIMES)}: {times:.2f} times specforge, want {AIM_TIMES}")
    if optimizer:
        peak = optimizer["peak_bytes"] / 2**30
        said.append(f"aim {verdict(peak < AIM_PEAK_GIB)}: peak with the optimizer {peak:.1f} GiB, want {AIM_PEAK_GIB}")
    return said


def _row(name: str, part: dict, figures: dict) -> list[str]:
    shown = lambda value, form: "" if value is None else f"{value:{form}}"
    return [
        name, f"{part['ms']:.1f} [{part['least_ms']:.1f}, {part['most_ms']:.1f}]",
        f"{part['blocks'] / part['ms'] * 1000:,.0f}", shown(fraction(part, figures), ".3f"),
        f"{part['peak_bytes'] / 2**30:.1f}", shown(times_specforge(name, part, figures), ".2f"), str(part["steps"]),
        f"{part['warmup_s']:.0f}",
    ]  # fmt: skip


def _rates(figures: dict) -> Iterator[str]:
    if "rate" in figures:
        rate = figures["rate"]
        each = ", ".join(f"{name} {value:.3g}" for name, value in rate["tflops"].items())
        yield f"{rate['device']}, torch {rate['torch']}, {rate['code']}: {rate['best_tflops']:.3g} TFLOP/s ({each})"


def _profile(figures: dict) -> Iterator[str]:
    for name, part in figures.items():
        if "by_kind_ms" in part:
            kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in part["by_kind_ms"].items())
            yield f"{name}: {part['sum_ms']:.1f} ms of kernels a step ({kinds}); the longest:"
            yield from (f"    {ms:8.2f} ms {count:6.1f}x  {kernel[:100]}" for kernel, ms, count in part["longest"])
