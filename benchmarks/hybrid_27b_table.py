"""What hybrid_27b.py measured, as one Markdown table, and which of its figures are beyond their bounds."""

from collections.abc import Iterator

from dflash_train.util.io import human_bytes

WORSE = 2.0
"""Our error may be this many times Hugging Face's own."""
CONTROL = 3.0
"""A control must be at least this many times as far off, or the comparison would see nothing."""
LOWEST_COSINE = 0.9  # of a padded row: another batch shape rounds differently, and 62 layers amplify it

Row = tuple[str, str, str]


def markdown(figures: dict, failed: dict[str, str]) -> str:
    """The table: part, measured, and what it is set beside."""
    rows = [row for name, part in figures.items() for row in _rows(name, part, figures)]
    rows += [(name, f"FAILED: {reason}", "") for name, reason in failed.items()]
    rows += [("beyond its bound", what, "") for what in beyond(figures)]
    return "\n".join(["| part | measured | beside |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def beyond(figures: dict) -> list[str]:
    """Every figure beyond its bound, in words; empty when all is well."""
    return [what for name, part in figures.items() for what in _beyond(name, part)]


def _kind(name: str) -> str:
    return name.split()[0]


# ---------------------------------------------------------------- bounds


def _beyond(name: str, part: dict) -> Iterator[str]:
    if _kind(name) == "capture" and not (part["finite"] and part["zero_rows"] == 0):
        yield f"{name}: finite {part['finite']}, {part['zero_rows']} rows all zero"
    if name == "padding":
        for layer, error in part.items():
            if not error["cosine"] >= LOWEST_COSINE:
                yield f"{name}: {layer} has cosine {error['cosine']:.5f}, at least {LOWEST_COSINE} is right"
    if name == "session":
        for case in part["verify"]:
            if not case["finite"]:
                yield f"{name}: {case['shape']} {case['nodes']} has logits that are no numbers"
    if _kind(name) == "layers":
        for layer in ("GDN layer", "attention layer"):
            yield from _compared(f"{name}: {layer}", part[layer])
            yield from _seen(f"{name}: {layer}", part[layer])
    if _kind(name) == "model":
        for against in ("logits against hugging face", "logits against float64"):
            yield from _seen(f"{name}, {against}", part[against]) if against in part else ()
        if "logits against float64" in part:
            errors = part["logits against float64"]
            yield from _compared(f"{name}, logits", errors)
            for layer, rows in part["captured rows against float64"].items():
                yield from _compared(f"{name}, captured {layer}", rows)


def _compared(where: str, errors: dict) -> Iterator[str]:
    for measure in ("rms", "max"):
        ours, theirs = errors["ours"][measure], errors["hugging face"][measure]
        if not ours <= WORSE * theirs:
            yield f"{where}: our {measure} error {ours:.2g} is over {WORSE:g} times Hugging Face's {theirs:.2g}"


def _seen(where: str, errors: dict) -> Iterator[str]:
    """Whether each control is far enough off."""
    for what, error in errors.items():
        if what.startswith("control") and not error["rms"] >= CONTROL * errors["ours"]["rms"]:
            yield f"{where}: {what} is only {error['rms']:.2g} off: the comparison sees nothing"


# ---------------------------------------------------------------- rows


def _rows(name: str, part: dict, figures: dict) -> Iterator[Row]:
    by_kind = {"machine": _machine, "build": _build, "capture": _capture, "padding": _padding, "session": _session,
               "layers": _layers, "model": _model}  # fmt: skip
    return by_kind[_kind(name)](name, part, figures.get("machine", {}))


def _machine(name: str, part: dict, machine: dict) -> Iterator[Row]:
    yield part["device"], f"torch {part['torch']}, transformers {part['transformers']}, {part['dtype']}", part["code"]
    void = ": VOID, no rate below counts" if part["void"] else ""
    yield ("matrix rate; copy", f"{part['matrix_tflops']:,.3g} TFLOP/s; {part['copy_tb_s']:.3g} TB/s",
           f"H200: void under 750; 4.0{void}")  # fmt: skip


def _build(name: str, part: dict, machine: dict) -> Iterator[Row]:
    yield (name, f"{part['num_parameters']:,} random parameters, {human_bytes(part['weight_bytes'])}, "
           f"{part['build_s']:.1f} s", f"a pass reads {human_bytes(part['weights_read_by_a_pass_bytes'])}")  # fmt: skip


def _capture(name: str, part: dict, machine: dict) -> Iterator[Row]:
    share = f"{part['tflops'] / machine['matrix_tflops']:.2f} of the matrix rate" if machine else ""
    yield (name, f"{part['tokens_per_s']:,.0f} tokens/s = {part['tflops']:.3g} TFLOP/s "
           f"({part['gflop_per_token']:.3g} GFLOP a token), peak {human_bytes(part['peak_bytes'])}", share)  # fmt: skip


def _padding(name: str, part: dict, machine: dict) -> Iterator[Row]:
    yield ("right-padded row against itself alone", "; ".join(f"{layer}: {_error(e)}" for layer, e in part.items()),
           f"cosine at least {LOWEST_COSINE}")  # fmt: skip


def _session(name: str, part: dict, machine: dict) -> Iterator[Row]:
    context = part["context"]
    yield (f"prefill {context}", f"{part['prefill_s']:.2f} s = {context / part['prefill_s']:,.0f} tokens/s",
           f"peak {human_bytes(part['prefill_peak_bytes'])}")  # fmt: skip
    yield ("cache", f"KV {human_bytes(part['kv_bytes_per_token'])} a token, GDN states "
           f"{human_bytes(part['state_bytes'])}, conv rows {human_bytes(part['conv_bytes'])}", "")  # fmt: skip
    for case in part["verify"]:
        yield (f"verify {case['shape']} {case['nodes']}, eager",
               f"{case['verify_ms']:.1f} ms, commit of {case['path']} {case['commit_ms']:.1f} ms, stash "
               f"{human_bytes(case['stash_bytes'])}, peak {human_bytes(case['peak_bytes'])}",
               f"bound {case['bound_ms']:.3g} ms: {case['times_bound']:.1f} times it")  # fmt: skip


def _layers(name: str, part: dict, machine: dict) -> Iterator[Row]:
    for layer in ("GDN layer", "attention layer"):
        for what, error in part[layer].items():
            against = "" if "against" in what else "against float64"
            yield f"{name}: one {layer}: {what}", _error(error), against


def _model(name: str, part: dict, machine: dict) -> Iterator[Row]:
    for against in ("logits against hugging face", "logits against float64"):
        for what, error in part.get(against, {}).items():
            margins = error["margins_where_different"]
            differ = (
                f"; margins where it differs {margins[-4:]}, median {error['median_margin']:.2f}" if margins else ""
            )
            yield (f"{name}: {what}", f"{_error(error)}, largest {error['logit_difference']:.2g}, top-1 "
                   f"{error['top1']:.1%}{differ}", against)  # fmt: skip
    both = lambda error: f"{error['ours']['rms']:.1e} and {error['hugging face']['rms']:.1e}"
    rows = "; ".join(f"{layer} {error['rms']:.1e}" for layer, error in part["captured rows"].items())
    yield f"{name}: captured rows, rms", rows, "against hugging face"
    if "captured rows against float64" in part:
        rows = "; ".join(f"{layer} {both(e)}" for layer, e in part["captured rows against float64"].items())
        yield f"{name}: captured rows, rms, ours and hugging face's", rows, "against float64"


def _error(error: dict) -> str:
    return f"rms {error['rms']:.1e}, max {error['max']:.1e}, cosine {error['cosine']:.6f}"
