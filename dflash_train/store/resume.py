"""Resume = do what has no valid marker.

Markers without a catalogue, as a killed run leaves them, cost a request each: whoever reads them here catalogues them,
and nobody reads them a second time.
"""

from dflash_train.store.base import ObjectStore
from dflash_train.store.catalog import marker_groups, tally, write_catalog
from dflash_train.store.markers import InvalidMarker, remove_marker
from dflash_train.store.shard import MANIFEST, read_manifest
from dflash_train.store.slices import ShardPlan
from dflash_train.store.target_files import has_target_files
from dflash_train.util.log import say


def is_complete(store: ObjectStore, inputs_hash: str) -> bool:
    """The store was made from these very inputs, and nothing is missing in it."""
    if store.size(MANIFEST) is None:
        return False
    manifest = read_manifest(store)
    if manifest.get("inputs_hash") != inputs_hash or not has_target_files(store):
        return False
    want = sum(manifest["shards"].values())
    if len(store.list("markers/")) < want:
        return False
    total = tally(store, update_catalog=True)
    return not total.num_invalid and total.num_shards == want


def missing_shards(store: ObjectStore, shards: list[ShardPlan]) -> list[ShardPlan]:
    """Shards without a valid marker. Invalid markers are reported and removed, so their shards can be done again."""
    done = set()
    for group in marker_groups(store):
        for marker in group.markers:
            if isinstance(marker, InvalidMarker):
                say(f"redoing {marker.key}: {marker.reason}")
                remove_marker(store, marker.key, marker.content)
            else:
                done.add(marker.shard_id)
        write_catalog(store, group)
    return [shard for shard in shards if shard.shard_id not in done]
