"""Which sample goes into which shard and which forward: pure functions of sample ids, lengths and configuration.

So any worker makes the same shard, and a resumed run makes the same set.
"""

from dataclasses import dataclass

from dflash_train.util.provenance import digest, stable_hash


@dataclass(frozen=True)
class ShardPlan:
    """A slice of the fixed order: which samples (ids and lengths in tokens, in the shard's own order)."""

    shard_id: str
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def plan_shards(
    split: str, lengths: dict[str, int], *, seed: int, window_samples: int, shard_tokens: int
) -> list[ShardPlan]:
    """Sample id -> length, into shards of at most `shard_tokens` tokens (more only where one sample alone has more).

    Samples are put in a seeded order, which does not depend on the order they come in; inside windows of it they are
    bucketed by length, so that a forward pads little, while a shard is no sample of one length of the whole mix.
    """
    order = sorted(lengths, key=lambda sample_id: (stable_hash(seed, "order", sample_id), sample_id))
    bucketed = []
    for start in range(0, len(order), window_samples):
        bucketed += sorted(order[start : start + window_samples], key=lambda sample_id: lengths[sample_id])
    slices, current, tokens = [], [], 0
    for sample_id in bucketed:
        if current and tokens + lengths[sample_id] > shard_tokens:
            slices.append(current)
            current, tokens = [], 0
        current.append(sample_id)
        tokens += lengths[sample_id]
    slices += [current] if current else []
    shards = []
    for number, ids in enumerate(slices):
        ids = sorted(ids, key=lambda sample_id: lengths[sample_id])  # a slice may reach into the next window
        shards.append(ShardPlan(f"{split}-{number:05d}", tuple(ids), tuple(lengths[i] for i in ids)))
    return shards


def plan_batches(lengths: tuple[int, ...], batch_tokens: int) -> list[slice]:
    """Consecutive samples of a shard whose padded rows (count x longest) stay within `batch_tokens`.

    A sample longer than that would come alone; `ExtractConfig.check` rules it out.
    """
    batches, start = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or max(lengths[start : i + 1]) * (i + 1 - start) > batch_tokens:
            batches.append(slice(start, i))
            start = i
    return batches


def plan_hash(shards: list[ShardPlan], content_hashes: dict[str, str]) -> str:
    """Names a plan: shards, their samples in order, and what those samples say (sample id -> hash of ids and mask)."""
    return digest([[shard.shard_id, [[i, content_hashes[i]] for i in shard.sample_ids]] for shard in shards])
