"""What lies on a GPU at once in each stage, whether it fits, and which key would make it fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dflash_train.config import SPREAD_ABOVE, PlanRun
from dflash_train.planning import memory
from dflash_train.planning.shapes import (
    TargetSizes,
    layers_parameters,
    share_sizes,
    table_parameters,
    target_parameters,
)

PARTS = ("weights", "KV", "state", "stash", "drafter", "optimizer", "activations", "logits")
MOST_GPUS = 8


@dataclass(frozen=True)
class Fit:
    """One row: bytes per GPU by part, at the moment of the peak, and what can be used of the GPU (None = unknown)."""

    name: str
    parts: dict[str, int]
    usable: int | None
    fixes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        return None if self.usable is None else self.total <= self.usable


@dataclass(frozen=True)
class Problem:
    """Everything the parts follow from. run: with a resolved drafter and a machine; offload: optimizer on the host."""

    run: PlanRun
    sizes: TargetSizes
    offload: bool = False

    @property
    def item(self) -> int:
        return memory.ITEM_BYTES[self.run.target.dtype]

    @property
    def world(self) -> int:
        return max(1, self.run.hardware.num_gpus or 1)

    @property
    def usable(self) -> int | None:
        hardware = self.run.hardware
        return None if hardware.memory_bytes is None else hardware.memory_bytes - hardware.reserve_bytes

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that hold one copy of the target."""
        total = self.run.hardware.memory_bytes
        weights = target_parameters(self.sizes) * self.item
        return self.world if total is not None and weights > SPREAD_ABOVE * total else 1

    @property
    def copies(self) -> int:
        return self.world // self.gpus_per_copy

    @property
    def capturing(self) -> int:
        """GPUs that compute at the same time in extract: all of whole groups, or one a copy of the target."""
        ways = self.run.extract.gpus_per_worker
        return self.world // ways * ways if ways > 1 else self.copies


def target_weights(problem: Problem) -> int:
    """Of the fullest GPU: everything, or its share of the layers and one of the two tables."""
    ways, sizes = problem.gpus_per_copy, problem.sizes
    if ways == 1:
        return target_parameters(sizes) * problem.item
    return (layers_parameters(sizes) // ways + table_parameters(sizes)) * problem.item


def regenerate_parts(problem: Problem) -> dict[str, int]:
    """A batch of answers grown to their full length, by the library's own generate: keys and values of one layer are
    copied when a token is added, and repeated for all heads under the mask of left padding."""
    run, sizes, item, ways = problem.run, problem.sizes, problem.item, problem.gpus_per_copy
    answers, prompt = run.data.answers, int(run.assume.prompt_tokens)
    cache = memory.kv_bytes(sizes, answers.batch_size * (prompt + answers.max_new_tokens), item)
    repeated = cache // max(1, sizes.num_full_layers) * (1 + sizes.shape.num_heads // sizes.shape.num_kv_heads)
    prefill = memory.working_bytes(sizes, answers.batch_size * prompt, item)
    state = memory.recurrent_bytes(sizes) + memory.conv_bytes(sizes, sizes.shape.conv_kernel, item)
    return {
        "weights": target_weights(problem), "KV": cache // ways, "state": answers.batch_size * state // ways,
        "activations": max(repeated, prefill), "logits": answers.batch_size * sizes.vocab_size * (item + 8),
    }  # fmt: skip


def extract_parts(problem: Problem) -> dict[str, int]:
    """One capture pass over a full batch. A group of GPUs holds a share of each layer, the embedding, and no head."""
    run, sizes, weights = problem.run, problem.sizes, target_weights(problem)
    if run.extract.gpus_per_worker > 1:
        sizes = share_sizes(sizes, run.extract.gpus_per_worker)
        weights = (layers_parameters(sizes) + table_parameters(sizes) + sizes.hidden_size) * problem.item
    taps = len(run.drafter.target_layer_ids)
    peak = memory.capture_bytes(sizes, run.extract.batch_tokens, taps, run.store.last_hidden, problem.item)
    return {"weights": weights, "activations": peak}


def eval_parts(problem: Problem) -> dict[str, int]:
    """One sequence of `context` tokens, a tree of `budget` nodes beside its root, and the drafter on the first GPU."""
    run, sizes, item, ways = problem.run, problem.sizes, problem.item, problem.gpus_per_copy
    nodes, taps = run.budget + 1, len(run.drafter.target_layer_ids)
    capacity = run.context + nodes
    cache = memory.kv_bytes(sizes, capacity, item)
    logits = nodes * sizes.vocab_size * (item + 4)
    prefill = memory.capture_bytes(sizes, run.context, taps, False, item)
    drafter = memory.all_drafter_parameters(run.drafter) * item
    return {
        "weights": target_weights(problem), "KV": cache // ways,
        "state": (memory.session_bytes(sizes, capacity, item) - cache) // ways,
        "stash": memory.pending_bytes(sizes, nodes, item) // ways,
        "drafter": drafter + memory.draft_cache_bytes(run.drafter, capacity, item),
        "activations": max(prefill, memory.verify_bytes(sizes, nodes, taps, item) - logits), "logits": logits,
    }  # fmt: skip


def train_parts(problem: Problem) -> dict[str, int]:
    """One rank of a training; the target itself is not there, only its tables."""
    run = problem.run
    return memory.training_parts(run.drafter, run.train, run.zero.stage, problem.world,
                                 tied=bool(problem.sizes.shape.tied), on_gpu=run.hardware.num_gpus != 0,
                                 offload=problem.offload)  # fmt: skip


# ---------------------------------------------------------------- what would help


def with_key(run: PlanRun, key: str, value: object) -> PlanRun:
    """A copy of the run with one dotted key set."""
    head, _, rest = key.partition(".")
    return replace(run, **{head: with_key(getattr(run, head), rest, value) if rest else value})


def halvings(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def can_split(run: PlanRun, ways: int) -> bool:
    """Whether so many ranks share out the target's heads; experts are not shared out."""
    shape = run.target.shape
    counts = (shape.num_heads, shape.num_kv_heads, shape.linear_key_heads, shape.linear_value_heads,
              shape.intermediate_size)  # fmt: skip
    return not shape.num_experts and not any((count or 0) % ways for count in counts)


def knobs(stage: str, run: PlanRun) -> dict[str, list[object]]:
    """Key -> values that need less memory, gentlest first, for a stage."""
    gpus = run.hardware.num_gpus or 0
    more = {"hardware.num_gpus": [n for n in (2, 4, 8) if gpus < n <= MOST_GPUS] if gpus else []}
    if stage == "regenerate":
        answers = run.data.answers
        return {"data.answers.batch_size": list(halvings(answers.batch_size, 1)),
                "data.answers.max_new_tokens": list(halvings(answers.max_new_tokens, 512)), **more}  # fmt: skip
    if stage == "extract":
        split = [n for n in (2, 4, 8) if run.extract.gpus_per_worker < n <= gpus and can_split(run, n)]
        return {"extract.batch_tokens": list(halvings(run.extract.batch_tokens, run.extract.max_tokens)),
                "extract.gpus_per_worker": split, **more}  # fmt: skip
    if stage == "eval":
        return {"budget": list(halvings(run.budget, 15)), "context": list(halvings(run.context, 512)), **more}
    train = run.train
    return {"zero.stage": list(range(run.zero.stage + 1, 4)),
            "train.micro_batch": list(halvings(train.micro_batch, 1)),
            "train.head_chunk_blocks": list(halvings(train.head_chunk_blocks, 8)),
            "train.num_anchors": list(halvings(train.num_anchors, 64)), **more}  # fmt: skip


STAGES: dict[str, Callable[[Problem], dict[str, int]]] = {
    "regenerate": regenerate_parts,
    "extract": extract_parts,
    "eval": eval_parts,
    "train": train_parts,
}


def spell(key: str, value: object) -> str:
    """As it is typed for the stage that it is about."""
    return {"zero.stage": f"zero=zero{value}", "budget": f"eval.budget={value}",
            "context": f"a context of {value} (eval.max_new_tokens)"}.get(key, f"{key}={value}")  # fmt: skip


def fixes(stage: str, problem: Problem, most: int = 2) -> tuple[str, ...]:
    """Up to `most` keys, each of which alone makes the stage fit; else all of them turned down together."""
    if problem.usable is None:
        return ()
    total = lambda run: sum(STAGES[stage](replace(problem, run=run)).values())
    found, together, spelled = [], problem.run, []
    for key, values in knobs(stage, problem.run).items():
        for value in values:
            if total(with_key(problem.run, key, value)) <= problem.usable:
                found.append(spell(key, value))
                break
        if values:
            together = with_key(together, key, values[-1])
            spelled.append(spell(key, values[-1]))
    if found:
        return tuple(found[:most])
    return (" ".join(spelled),) if spelled and total(together) <= problem.usable else ()


def fit(stage: str, problem: Problem, name: str | None = None) -> Fit:
    """The row of a stage, with fixes where it does not fit."""
    row = Fit(name or stage, STAGES[stage](problem), problem.usable)
    return row if row.fits is not False else replace(row, fixes=fixes(stage, problem))


def all_fits(run: PlanRun, sizes: TargetSizes) -> list[Fit]:
    """regenerate, extract, eval, and train at every ZeRO stage with the optimizer on the GPU and on the host."""
    problem = Problem(run, sizes)
    rows = [fit(stage, problem) for stage in ("regenerate", "extract", "eval")]
    for offload in (False, True):
        for stage in (1, 2, 3):
            here = replace(problem, run=with_key(run, "zero.stage", stage), offload=offload)
            rows.append(fit("train", here, f"train zero{stage}" + (" offload" if offload else "")))
    return rows
