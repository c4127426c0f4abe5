"""What every stage checks of its target right after loading it: seconds now, or a day of wrong rows later.

    capture   rows     every block of every layer: finite, no row of zeros, rows of different tokens differ
              layers   captured layer i is the library's own hidden_states[i+1], and no other entry is nearer
              padding  rows of a right-padded batch are those of each sequence alone
              prefill  on targets with recurrent layers: our session, other code than the library's, has the same rows
    decode    chain    one node a pass, against the library's plain forward of the same text
              tree     a branching tree in one pass, against both
              commit   the step after an accepted branch, against the plain forward of the text that leaves
    answer    answer   each greedy token of a left-padded batch is the plain forward's best, too

An error is |got - want| / |want| of the worst row in one layer, or of its logits less their mean.
SmolLM2-135M on a CPU, healthy: 8e-6 in float32, 0.04 in bfloat16; broken on purpose: 0.55 to 1.6 in both.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from itertools import chain
from math import ceil

import torch
from torch import Tensor

from dflash_train.config import TargetConfig
from dflash_train.records import Features, FeatureSpec, Tree
from dflash_train.target.base import TargetSession, hf_index
from dflash_train.target.hf import HFTarget
from dflash_train.util.device import device_name
from dflash_train.util.errors import UserError
from dflash_train.util.log import say

LIMITS = {torch.float32: (1e-3, 1e-3, 1e-2), torch.bfloat16: (0.04, 0.1, 0.1)}
"""Largest error of the same pass, of the same kernels on another batch, of other kernels."""
FLA_LIMITS = {torch.float32: 0.05, torch.bfloat16: 0.2}
"""Of other kernels where fla's run: they multiply float32 in tf32. Healthy tiny hybrids on an H200: 0.011, 0.097."""
NOISE_FACTOR = 4  # a tree may be off by this much more than the model's own chain, if that is within the limits

TEXT = "The quick brown fox jumps over 13 lazy dogs; my cat, however, waits: why hurry before Zoe's six o'clock queue?"
CONTEXT, LENGTHS = 6, (5, 9)
PARENTS, DEPTHS = (-1, 0, 0, 1, 1, 2, 4), (0, 1, 1, 2, 2, 2, 3)
PATHS, BRANCH = ((0, 1, 3), (0, 2, 5), (0, 1, 4, 6)), (0, 2, 5)
"""A path of four nodes fills a causal convolution of four within the tree; BRANCH must be moved when committed."""
NUM_TOKENS = CONTEXT + len(PARENTS) + 1
ROOT = torch.tensor([-1]), torch.tensor([0])  # parents and depths of a tree of one node
LONG_REPEATS = 6  # 84 tokens: recurrent kernels work in chunks of 64, and must carry a state from one to the next
ANSWER_TOKENS = 4
PACKAGES = ("torch", "transformers", "triton", "flash-linear-attention", "causal-conv1d", "kernels")

Rows = dict[str, Tensor]  # {"layer 3" | "the logits" | ...: float32 [n, ...]}; a loud layer must not hide a quiet one


@dataclass(frozen=True)
class Finding:
    """The worst figure of one comparison, and where it was."""

    check: str
    error: float
    limit: float
    where: str


def limits(target: HFTarget) -> tuple[float, float, float]:
    """Those of LIMITS, wider where the library runs its recurrent layers by fla."""
    same, wider, other = LIMITS[target.dtype]
    return same, wider, FLA_LIMITS[target.dtype] if runs_fla(target) else other


def runs_fla(target: HFTarget) -> bool:
    return bool(target.delta_layers) and target.device.type == "cuda"


def check_target(target: HFTarget, config: TargetConfig, checks: Iterable[str],
                 layer_ids: Iterable[int] | None = None) -> list[Finding]:  # fmt: skip
    """Make the named checks ("capture", "decode", "answer") and say the largest error in one line.

    layer_ids: those the stage captures; None = first, middle and last but one. `target.canary=false` checks nothing.
    Raises UserError at the first figure beyond its limit.
    """
    if not config.canary:
        say("canary: off (target.canary=false): nothing has checked that this target computes what it should")
        return []
    start_s, last, findings, ids = time.monotonic(), target.spec.num_layers - 1, [], distinct_ids(target)
    layer_ids = tuple(layer_ids or sorted({0, last // 2, last - 1}))
    for finding in chain.from_iterable(CHECKS[name](target, ids, layer_ids) for name in checks):
        if not finding.error <= finding.limit:
            raise broken(target, finding.check, f"error {finding.error:.2g} at {finding.where}",
                         f"at most {finding.limit:.2g} in {str(target.dtype).removeprefix('torch.')}")  # fmt: skip
        findings.append(finding)
    worst = max(findings, key=lambda finding: finding.error / finding.limit)
    say(f"canary: {len({finding.check for finding in findings})} checks, largest error {worst.error:.1g} ({worst.check}"
        f", at most {worst.limit:.1g}), {time.monotonic() - start_s:.1f} s")  # fmt: skip
    return findings


def broken(target: HFTarget, check: str, got: str, want: str) -> UserError:
    """What a failed check says."""
    names = {found.name.replace("_", "-"): found.version for found in distributions()}
    versions = [f"{name} {names[name]}" for name in PACKAGES if name in names]
    return UserError(
        f"canary: {check} of target {target.spec.name}", got=got, want=want,
        fix=f"a kernel or a package is broken here ({', '.join(versions)} on {device_name(target.device)}): try other "
            "versions, hardware=cpu or another target.dtype; target.canary=false goes on at your own risk",
    )  # fmt: skip


def distinct_ids(target: HFTarget) -> Tensor:
    """i64[NUM_TOKENS]: different tokens of real text, since equal rows of different tokens are a failure."""
    ids = list(dict.fromkeys(target.tokenizer(TEXT, add_special_tokens=False)["input_ids"]))
    assert len(ids) >= NUM_TOKENS, f"this tokenizer finds only {len(ids)} different tokens in the canary's text"
    return torch.tensor(ids[:NUM_TOKENS])


# ---------------------------------------------------------------- rows and their errors


@torch.inference_mode()
def plain_states(target: HFTarget, ids: Tensor) -> list[Tensor]:
    """The twin of everything: the library's own hidden_states of i64[T], N+1 tensors [T, H]. No cache, no padding, and
    none of our hooks."""
    out = target.decoder(input_ids=ids[None].to(target.device), use_cache=False, output_hidden_states=True)
    return [state[0].to(target.device) for state in out.hidden_states]


@torch.inference_mode()
def plain_rows(target: HFTarget, ids: Tensor, layer_ids: tuple[int, ...], rows: slice) -> Rows:
    states = [state[rows] for state in plain_states(target, ids)]
    features = Features(torch.cat([states[hf_index(i)] for i in layer_ids], dim=-1), states[-1])
    return named(features, layer_ids, target.logits(states[-1]))


def named(features: Features, layer_ids: tuple[int, ...], logits: Tensor | None = None) -> Rows:
    rows = {f"layer {i}": part for i, part in zip(layer_ids, features.hidden.chunk(len(layer_ids), dim=-1))}
    if features.last_hidden is not None:
        rows["the last hidden state"] = features.last_hidden
    if logits is not None:
        rows["the logits"] = logits - logits.mean(-1, keepdim=True)
    return {name: value.to("cpu", torch.float32) for name, value in rows.items()}


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """[n, H] twice -> [n]; what is not finite is larger than anything."""
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(nan=float("inf"))


def worst_of(target: HFTarget, check: str, limit: float, got: Rows, want: Rows, labels: list[str]) -> Finding:
    """The largest row error over all that `got` has, or the first layer's that is beyond the limit.

    Bfloat16 or tf32 sends a token to another expert at a router's near tie, legally: a fifth of a mixture's rows is let
    off.
    """
    found = []
    rounded = target.dtype == torch.bfloat16 or runs_fla(target)
    mixture = rounded and any(name.endswith("experts") for name, _ in target.decoder.named_modules())
    for name, rows in got.items():
        errors = row_errors(rows, want[name])
        error, row = errors.kthvalue(ceil(0.8 * len(errors)) if mixture else len(errors))
        found.append(Finding(check, float(error), limit, f"{labels[int(row)]}, {name}"))
    beyond = [finding for finding in found if finding.error > limit]
    return beyond[0] if beyond else max(found, key=lambda finding: finding.error)


# ---------------------------------------------------------------- capture


def check_capture(target: HFTarget, ids: Tensor, layer_ids: tuple[int, ...]) -> Iterator[Finding]:
    same, wider, other = limits(target)
    tokens = [f"token {i}" for i in range(len(ids))]
    states = [state.to("cpu", torch.float32) for state in watched_states(target, ids)]
    yield Finding("rows", 0.0, same, "every block")

    captured = named(target.capture(ids[None], layer_ids, True).select(0), layer_ids)
    want = {f"layer {i}": states[hf_index(i)] for i in layer_ids} | {"the last hidden state": states[-1]}
    for layer_id in layer_ids:  # neighbours can be near each other, so the right one must be the nearest
        errors = torch.stack([row_errors(captured[f"layer {layer_id}"], state).mean() for state in states])
        if errors[hf_index(layer_id)] > errors.min():
            raise broken(target, "layers", f"rows of layer {layer_id} are nearest to hidden_states[{errors.argmin()}]",
                         f"hidden_states[{hf_index(layer_id)}], off by {errors[hf_index(layer_id)]:.2g}")  # fmt: skip
    yield worst_of(target, "layers", same, captured, want, tokens)
    alone = named(target.capture(ids[None], layer_ids[:1]).select(0), layer_ids[:1])  # and the pass ends there
    yield worst_of(target, "layers", same, alone, want, tokens)

    batch = torch.zeros(1 + len(LENGTHS), len(ids), dtype=torch.int64)
    for row, length in enumerate((len(ids), *LENGTHS)):
        batch[row, :length] = ids[:length]
    padded = target.capture(batch, layer_ids, True)
    yield worst_of(target, "padding", wider, named(padded.select(0), layer_ids), captured, tokens)
    for row, length in enumerate(LENGTHS, start=1):
        alone = named(target.capture(ids[None, :length], layer_ids, True).select(0), layer_ids)
        rows = named(padded.select(row).select(slice(length)), layer_ids)
        labels = [f"{token} of {length} in a wider batch" for token in tokens]
        yield worst_of(target, "padding", wider, rows, alone, labels)

    if target.delta_layers:
        text = ids.repeat(LONG_REPEATS)
        features = target.session(len(text), FeatureSpec(layer_ids, True)).prefill(text)[1]
        want, labels = plain_rows(target, text, layer_ids, slice(None)), [f"token {i}" for i in range(len(text))]
        yield worst_of(target, "prefill", other, named(features, layer_ids), want, labels)


def watched_states(target: HFTarget, ids: Tensor) -> list[Tensor]:
    """`plain_states`, or UserError naming the first block whose rows cannot be right. Blocks, not just layers: a mixer
    that returns zeros hides in the residual stream."""
    problems = []

    def look(name: str, module, args, output) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        if problem := row_problem(rows.reshape(-1, rows.shape[-1])):
            problems.append(f"{problem} after {name}")

    blocks = {f"layer {i}": layer for i, layer in enumerate(target.layers)}
    blocks |= {f"{name} of {where}": b for where, layer in blocks.items() for name, b in layer.named_children()}
    handles = [block.register_forward_hook(partial(look, name)) for name, block in blocks.items()]
    try:
        states = plain_states(target, ids)
    finally:
        for handle in handles:
            handle.remove()
    if problems:
        raise broken(target, "rows", problems[0], "finite rows, none all zero, different for different tokens")
    return states


def row_problem(rows: Tensor) -> str | None:
    """What is wrong with rows [T, H] of T different tokens."""
    for problem, bad in {"NaN or Inf": ~rows.isfinite().all(-1), "all zero": (rows == 0).all(-1)}.items():
        if bad.any():
            return f"{int(bad.sum())} of {len(rows)} rows {problem}"
    num_different = len(rows.unique(dim=0))
    return None if num_different == len(rows) else f"{len(rows)} different tokens give {num_different} different rows"


# ---------------------------------------------------------------- decode


def check_decode(target: HFTarget, ids: Tensor, layer_ids: tuple[int, ...]) -> Iterator[Finding]:
    limit, _, other = limits(target)
    context, drafted, after = ids[:CONTEXT], ids[CONTEXT:-1], ids[-1:]
    texts = {path: torch.cat([context, drafted[list(path)]]) for path in PATHS}
    labels = {path: [f"node {node} at depth {d} of path {list(path)}" for d, node in enumerate(path)] for path in PATHS}
    plain = {path: plain_rows(target, texts[path], layer_ids, slice(CONTEXT, None)) for path in PATHS}
    chains = {}
    for path in PATHS:
        session = started(target, context, layer_ids)
        steps = [advance(session, Tree(drafted[[node]], *ROOT), (0,), layer_ids) for node in path]
        chains[path] = {name: torch.cat([rows[name] for rows in steps]) for name in steps[0]}
        yield (noise := worst_of(target, "chain", other, chains[path], plain[path], labels[path]))
        limit = max(limit, min(other, NOISE_FACTOR * noise.error))

    session = started(target, context, layer_ids)
    nodes = advance(session, Tree(drafted, torch.tensor(PARENTS), torch.tensor(DEPTHS)), BRANCH, layer_ids)
    for path in PATHS:
        got = {name: rows[list(path)] for name, rows in nodes.items()}
        for twin in (chains[path], plain[path]):
            yield worst_of(target, "tree", limit, got, twin, labels[path])

    want = plain_rows(target, torch.cat([texts[BRANCH], after]), layer_ids, slice(-1, None))
    got = advance(session, Tree(after, *ROOT), (0,), layer_ids)
    yield worst_of(target, "commit", limit, got, want, [f"the token after accepted nodes {list(BRANCH)}"])


def started(target: HFTarget, context: Tensor, layer_ids: tuple[int, ...]) -> TargetSession:
    session = target.session(NUM_TOKENS, FeatureSpec(layer_ids, True))
    session.prefill(context)
    return session


def advance(session: TargetSession, tree: Tree, path: tuple[int, ...], layer_ids: tuple[int, ...]) -> Rows:
    """The rows of all nodes; those of the path are committed."""
    logits, features = session.forward(tree)
    session.commit(list(path))
    return named(features, layer_ids, logits)


# ---------------------------------------------------------------- answer


def check_answer(target: HFTarget, ids: Tensor, layer_ids: tuple[int, ...]) -> Iterator[Finding]:
    """Ties may fall either way, so what counts is how far a token is behind the best, in deviations of the logits."""
    prompts = [ids[:length].tolist() for length in LENGTHS]
    answers = target.answer(prompts, max_new_tokens=ANSWER_TOKENS, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    for prompt, (answer, _) in zip(prompts, answers):
        rows = slice(len(prompt) - 1, -1)
        logits = plain_rows(target, torch.tensor(prompt + answer), layer_ids, rows)["the logits"]
        chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        behind, row = ((logits.max(-1).values - chosen) / logits.std(-1)).nan_to_num(nan=float("inf")).max(dim=0)
        where = f"token {row} of the answer to {len(prompt)} tokens, padded to {max(LENGTHS)}"
        limit = 3 * limits(target)[-1]  # two noisy logits, the worst of several
        yield Finding("answer", float(behind), limit, where)


CHECKS = {"capture": check_capture, "decode": check_decode, "answer": check_answer}
