"""Resume = do what has no valid marker."""

from dflash_train.store.base import ObjectStore
from dflash_train.store.shard import MANIFEST, read_manifest, scan_markers
from dflash_train.store.slices import ShardPlan
from dflash_train.store.target_files import has_target_files
from dflash_train.util.log import say


def is_complete(store: ObjectStore, inputs_hash: str) -> bool:
    """The store was made from these very inputs, and nothing is missing in it."""
    if store.size(MANIFEST) is None:
        return False
    manifest = read_manifest(store)
    valid, invalid = scan_markers(store)
    whole = not invalid and len(valid) == sum(manifest["shards"].values()) and has_target_files(store)
    return whole and manifest.get("inputs_hash") == inputs_hash


def missing_shards(store: ObjectStore, shards: list[ShardPlan]) -> list[ShardPlan]:
    """Shards without a valid marker. Invalid markers are reported and removed, so their shards can be done again."""
    valid, invalid = scan_markers(store)
    for marker in invalid:
        say(f"redoing {marker.key}: {marker.reason}")
        if store.get_bytes(marker.key) == marker.content:  # another worker may have repaired it meanwhile
            store.delete(marker.key)
    done = {marker.shard_id for marker in valid}
    return [shard for shard in shards if shard.shard_id not in done]
