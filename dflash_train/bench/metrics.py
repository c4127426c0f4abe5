"""What a set of generations says: acceptance (pooled, macro, by position), intervals, speed, agreement.

Acceptance length is tokens committed per verify forward, bonus included. It is always given twice:
    pooled   sum of tokens / sum of rounds over all prompts
    macro    mean over prompts of the prompt's own ratio
Nothing here averages averages over batches or multiplies marginals. The unit that bootstrap resamples is the prompt
(both turns of a two-turn prompt together).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dflash_train.records import Generation
from dflash_train.util.errors import UserError

NUM_RESAMPLES = 2000
# One node or many take different kernels, so float32 logits differ by rounding: up to 2e-5 measured on a 135M target.
FLOAT32_TIE = 1e-4


@dataclass(frozen=True)
class PromptResult:
    """One answer of one method: turn counts from 0."""

    task: str
    id: str
    turn: int
    generation: Generation


@dataclass(frozen=True)
class MethodResult:
    """All answers of one method. name labels it in tables; settings says how it was configured."""

    name: str
    method: str
    settings: dict = field(default_factory=dict)
    results: list[PromptResult] = field(default_factory=list)

    def of_task(self, task: str) -> list[PromptResult]:
        return [result for result in self.results if result.task == task]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(result.task for result in self.results))


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


# ---------------------------------------------------------------- acceptance


def prompt_counts(results: Iterable[PromptResult]) -> dict[tuple[str, str], tuple[int, int]]:
    """Counted (tokens, rounds) per prompt (task, id), turns together. Prompts without a round are absent."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for result in results:
        lengths = result.generation.round_lengths
        tokens, rounds = counts.get((result.task, result.id), (0, 0))
        counts[(result.task, result.id)] = (tokens + sum(lengths), rounds + len(lengths))
    return {key: value for key, value in counts.items() if value[1] > 0}


def pooled_acceptance(results: Iterable[PromptResult]) -> float | None:
    """Sum of tokens / sum of rounds; None without a single counted round."""
    counts = list(prompt_counts(results).values())
    return sum(t for t, _ in counts) / sum(r for _, r in counts) if counts else None


def macro_acceptance(results: Iterable[PromptResult]) -> float | None:
    """Mean over prompts of tokens / rounds; None without a single counted round."""
    counts = list(prompt_counts(results).values())
    return sum(t / r for t, r in counts) / len(counts) if counts else None


def acceptance_by_position(results: Iterable[PromptResult]) -> list[float]:
    """Entry k-1: share of the counted rounds that committed at least k tokens before their last one, k = 1 .. deepest.

    Unconditional (every round is in the denominator), so 1 + sum(entries) is the pooled acceptance length.
    """
    lengths = [length for result in results for length in result.generation.round_lengths]
    drafted = [depth for result in results for depth in result.generation.draft_lengths]
    if not lengths:
        return []
    deepest = max([*drafted, *(length - 1 for length in lengths)])
    return [sum(length > k for length in lengths) / len(lengths) for k in range(1, deepest + 1)]


# ---------------------------------------------------------------- intervals


def _resampled(pairs: np.ndarray, seed: int) -> np.ndarray:
    """[P, K] per-prompt sums -> [NUM_RESAMPLES, K] sums over prompts drawn with replacement."""
    rng = np.random.default_rng(seed)
    num_prompts = len(pairs)
    weights = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=NUM_RESAMPLES)
    return weights @ pairs


def pooled_interval(results: Iterable[PromptResult], seed: int = 0) -> Interval | None:
    """Pooled acceptance with the 95 % percentile bootstrap over prompts."""
    pairs = np.array(list(prompt_counts(results).values()), dtype=float)
    if not len(pairs):
        return None
    sums = _resampled(pairs, seed)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    total = pairs.sum(axis=0)
    return Interval(float(total[0] / total[1]), float(low), float(high))


def paired_difference(a: MethodResult, b: MethodResult, seed: int = 0) -> dict[str, Interval] | None:
    """Pooled acceptance of a against b on the same prompts, resampled in pairs: {"difference": a - b, "ratio": a / b}.

    None where no prompt has a round in both. Raises UserError when the two were not measured on the same prompts.
    """
    prompts_a, prompts_b = ({(r.task, r.id) for r in method.results} for method in (a, b))
    counts_a, counts_b = prompt_counts(a.results), prompt_counts(b.results)
    shared = [key for key in counts_a if key in counts_b]  # a prompt answered by one token has no round
    if prompts_a != prompts_b:
        raise UserError(f"{a.name} against {b.name}", got=f"{len(prompts_a)} and {len(prompts_b)} prompts, "
                        f"{len(prompts_a & prompts_b)} of them the same", want="the same prompts",
                        fix="measure both in one run")  # fmt: skip
    if not shared:
        return None
    rows = np.array([[*counts_a[key], *counts_b[key]] for key in shared], dtype=float)
    sums, total = _resampled(rows, seed), rows.sum(axis=0)
    pooled = lambda s: (s[..., 0] / s[..., 1], s[..., 2] / s[..., 3])
    (many_a, many_b), (one_a, one_b) = pooled(sums), pooled(total)
    interval = lambda value, many: Interval(float(value), *map(float, np.quantile(many, [0.025, 0.975])))
    return {"difference": interval(one_a - one_b, many_a - many_b), "ratio": interval(one_a / one_b, many_a / many_b)}


def lower_prompts(a: MethodResult, b: MethodResult) -> list[dict]:
    """Prompts on which a accepts less than b: task, id and both ratios, largest loss first."""
    counts_a, counts_b = prompt_counts(a.results), prompt_counts(b.results)
    rows = []
    for key in counts_a.keys() & counts_b.keys():
        ratio_a, ratio_b = counts_a[key][0] / counts_a[key][1], counts_b[key][0] / counts_b[key][1]
        if ratio_a < ratio_b:
            rows.append({"task": key[0], "id": key[1], a.name: ratio_a, b.name: ratio_b})
    return sorted(rows, key=lambda row: (row[a.name] - row[b.name], row["task"], row["id"]))


# ---------------------------------------------------------------- speed


def tokens_per_s(results: Iterable[PromptResult]) -> float | None:
    """Tokens of the counted rounds per second of those rounds (draft + verify + commit); prefill is not in it."""
    generations = [result.generation for result in results]
    seconds = sum(g.decode_s for g in generations)
    return sum(sum(g.round_lengths) for g in generations) / seconds if seconds > 0 else None


def round_ms(results: Iterable[PromptResult]) -> dict[str, float] | None:
    """Mean milliseconds of one counted round and of its parts: {"propose", "verify", "commit", "total"}. None without
    a round, or where none was timed (a replay)."""
    generations = [result.generation for result in results]
    rounds = sum(len(g.round_lengths) for g in generations)
    if not rounds or not any(g.decode_s for g in generations):
        return None
    total = lambda name: 1000 * sum(getattr(g, f"{name}_s") for g in generations) / rounds
    return {"propose": total("propose"), "verify": total("verify"), "commit": total("commit"), "total": total("decode")}


# ---------------------------------------------------------------- agreement


@dataclass(frozen=True)
class Difference:
    """Where a method first left the autoregressive answer, and the target's top-1 minus top-2 logit there."""

    task: str
    id: str
    turn: int
    position: int
    margin: float


@dataclass(frozen=True)
class Agreement:
    """Greedy answers of a method against autoregressive ones. num_answers were comparable: the same prompt tokens."""

    num_answers: int
    num_equal: int
    differences: list[Difference]


def agreement(method: MethodResult, baseline: MethodResult) -> Agreement:
    """Compare answers token for token with the baseline's (whose margins must have been recorded).

    A second turn whose history already differs is another prompt, and is not compared.
    """
    expected = {(r.task, r.id, r.turn): r.generation for r in baseline.results}
    num_answers, differences = 0, []
    for result in method.results:
        want = expected.get((result.task, result.id, result.turn))
        got = result.generation
        if want is None or want.prompt_ids != got.prompt_ids:
            continue
        num_answers += 1
        if got.token_ids != want.token_ids:
            position = first_difference(got.token_ids, want.token_ids)
            differences.append(Difference(result.task, result.id, result.turn, position, want.margins[position]))
    return Agreement(num_answers, num_answers - len(differences), differences)


def first_difference(a: list[int], b: list[int]) -> int:
    """Index of the first entry that differs; where one list is the other's beginning, the last shared index."""
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared - 1)


def losslessness(result: Agreement | None, *, dtype: str, max_margin: float) -> tuple[str, str]:
    """(verdict, one sentence). Verdict: "not checked" | "equal" | "differs at near ties" | "FAILED".

    A first difference is legal only where the target itself was undecided: at a margin of at most max_margin logits,
    in float32 of at most FLOAT32_TIE, which is rounding.
    """
    if result is None or not result.num_answers:
        return "not checked", "greedy answers were not compared with autoregressive ones"
    said = f"{result.num_equal} of {result.num_answers} answers equal autoregressive ones token for token ({dtype})"
    if not result.differences:
        return "equal", said
    size = lambda difference: math.inf if math.isnan(difference.margin) else difference.margin
    first = max(result.differences, key=size)
    where = f"{first.task} {first.id} token {first.position}"
    said += (
        f", {len(result.differences)} differ; largest margin at a first difference {first.margin:.3g} logits ({where})"
    )
    limit, limit_name = (FLOAT32_TIE, "float32 rounding") if dtype == "float32" else (max_margin, "eval.max_margin")
    if size(first) > limit:
        return "FAILED", f"{said}, above {limit_name} ({limit:g})"
    return "differs at near ties", f"{said}, within {limit_name} ({limit:g})"
