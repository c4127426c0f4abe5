"""Held-out loss, per-slot accuracy and walk-simulated acceptance of the drafter inside the engine, over all ranks."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from dflash_train.config import DrafterConfig
from dflash_train.drafter.loss import Objective
from dflash_train.drafter.walk import evaluate_samples, sample_batch
from dflash_train.engine.agree import together
from dflash_train.engine.zero import ZeroEngine
from dflash_train.records import DraftBatch, HiddenShard, TargetHead
from dflash_train.store.loader import ShardCache, hidden_rows
from dflash_train.store.shard import Marker
from dflash_train.util import dist


def evaluate_heldout(
    engine: ZeroEngine, config: DrafterConfig, head: TargetHead, cache: ShardCache, markers: Sequence[Marker],
    *, num_samples: int, objective: Objective, stop_ids: Collection[int], attention: str,
) -> dict:  # fmt: skip
    """The first num_samples held-out samples, shared out over ranks -> heldout_loss, heldout_acceptance (pooled),
    heldout_acceptance_macro, heldout_accuracy (per slot from 1). A collective; every rank gets the same numbers."""
    refs = [(marker, j) for marker in markers for j in range(len(marker.sample_ids))][:num_samples]
    mine = refs[dist.rank() :: dist.world_size()]
    with together(engine.device):
        for marker in {marker.key: marker for marker, _ in mine}.values():
            cache.get(marker)  # a shard that cannot be read must fail before the first collective forward

    run = lambda samples: evaluate_samples(engine, config, head, samples, objective=objective, stop_ids=stop_ids,
                                           attention=attention, device=engine.device)  # fmt: skip
    with engine.evaluating():
        before = engine.num_forwards
        stats = run(heldout_sample(cache.get(marker), j) for marker, j in mine)
        # Under ZeRO-3 each forward is a collective: ranks with fewer of them keep the others company.
        counts = [0.0] * dist.world_size()
        counts[dist.rank()] = float(engine.num_forwards - before)
        counts = dist.all_reduce_sum(counts, engine.device)
        idle = _smallest_sample(cache, markers[0])
        for _ in range(int(max(counts)) - (engine.num_forwards - before)):
            run([idle])

    means = [sum(rounds) / len(rounds) for rounds in stats.round_lengths if rounds]
    tokens = sum(sum(rounds) for rounds in stats.round_lengths)
    rounds = sum(len(rounds) for rounds in stats.round_lengths)
    sums = [stats.numerator, stats.denominator, tokens, rounds, sum(means), len(means)]
    sums = dist.all_reduce_sum([*sums, *stats.correct, *stats.supervised], engine.device)
    slots = config.block_size - 1
    correct, supervised = sums[6 : 6 + slots], sums[6 + slots :]
    return {
        "heldout_loss": sums[0] / max(sums[1], 1e-9),
        "heldout_acceptance": sums[2] / max(sums[3], 1),
        "heldout_acceptance_macro": sums[4] / max(sums[5], 1),
        "heldout_accuracy": [hits / max(total, 1) for hits, total in zip(correct, supervised)],
        "heldout_rounds": int(sums[3]),
    }


def heldout_sample(shard: HiddenShard, j: int) -> DraftBatch:
    """Sample j of a shard as a batch of its own, decoded where its rows are stored in eight bits."""
    rows = slice(int(shard.offsets[j]), int(shard.offsets[j + 1]))
    return replace(sample_batch(shard, j), hidden=hidden_rows(shard, rows, torch.bfloat16)[None])


def _smallest_sample(cache: ShardCache, marker: Marker) -> DraftBatch:
    """Two tokens of a real sample, all supervised: exactly one forward."""
    sample = heldout_sample(cache.get(marker), 0)
    cut = lambda t: None if t is None else t[:, :2]
    return DraftBatch(
        cut(sample.token_ids), torch.ones(1, 2, dtype=torch.bool), cut(sample.document_ids), cut(sample.position_ids),
        cut(sample.hidden), cut(sample.last_hidden), sample.sample_ids,
    )  # fmt: skip
