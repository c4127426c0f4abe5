"""What training needs before it may cost anything: shards, drafter shape, resume point, and what it will take."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_train.config import DrafterConfig, TrainRun
from dflash_train.drafter.dflash import DFlashDrafter, init_weights, resolve_drafter
from dflash_train.drafter.files import find_checkpoint, load_drafter, parameter_shapes
from dflash_train.drafter.kernels import TORCH, Kernels
from dflash_train.drafter.loss import Objective, default_gamma
from dflash_train.drafter.mask import layer_types, mask_kind
from dflash_train.engine.checkpoint import check_resumable, find_resumable
from dflash_train.planning.memory import training_parts
from dflash_train.store import stream_reader
from dflash_train.store.base import ObjectStore
from dflash_train.store.loader import ShardCache
from dflash_train.store.order import Row, RowOrder, check_lengths, limit_markers
from dflash_train.store.shard import Marker, list_markers
from dflash_train.store.stream import StreamStore, planned_marker
from dflash_train.store.target_files import has_target_files
from dflash_train.util.device import cuda_problem
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What makes a drafter compute something; name, options and initializer_range do not.
_SHAPE_FIELDS = (
    "num_layers", "block_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
    "attention_bias", "rms_norm_eps", "rope_theta", "mask_token_id", "target_layer_ids", "num_target_layers",
    "target_hidden_size", "vocab_size",
)  # fmt: skip
# A resumed run continues with exactly these; the others (lr, epochs, save_every, ...) may change.
_FIXED_FIELDS = (
    "seed", "loss", "gamma", "dpace_alpha", "global_batch", "row_tokens", "long_samples", "num_anchors", "dtype",
    "weight_decay", "beta1", "beta2",
)  # fmt: skip
_FREE_FIELDS = ("lr", "min_lr_ratio", "warmup_ratio", "epochs", "max_steps", "max_minutes", "clip", "micro_batch")


@dataclass(frozen=True)
class Shards:
    """train, heldout: their markers. lengths: tokens per sample of each train shard, after `limit`."""

    train: list[Marker]
    heldout: list[Marker]
    lengths: list[list[int]]

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.lengths))


def output_dir(run: TrainRun) -> Path:
    """train.output_dir; a run with a limit keeps its own."""
    return Path(f"{run.train.output_dir}{run.limit_suffix}")


def find_shards(store: ObjectStore, manifest: dict, limit: int | None) -> Shards:
    """Every shard the manifest promises. Raises UserError when some are missing."""
    if isinstance(store, StreamStore):  # train shards come and go; what they hold is planned
        train = [planned_marker(shard) for shard in store.read_plan()]
    else:
        train = list_markers(store, "train")
    heldout = list_markers(store, "heldout")
    for split, markers in (("train", train), ("heldout", heldout)):
        want = manifest["shards"][split]
        if len(markers) != want:
            raise UserError(f"{store.url}/markers", got=f"{len(markers)} of {want} {split} shards",
                            want="a finished extraction", fix="run extract again: it resumes")  # fmt: skip
    if not train:
        raise UserError(f"{store.url}/markers", got="no train shard", want="at least one")
    return Shards(train, heldout, limit_markers(train, limit))


def check_target_files(store: ObjectStore, manifest: dict) -> None:
    """What training needs of the target beside its rows: embedding, head, config, and where its answers end."""
    if "stop_ids" not in manifest["target"]:
        raise UserError(f"{store.url}/manifest.json", got="no target.stop_ids: an earlier version made this store",
                        want="the tokens at which answers end", fix="extract into another store.root")  # fmt: skip
    if not has_target_files(store):
        raise UserError(f"{store.url}/target", got="incomplete", want="the target's embedding, head and config",
                        fix="run extract again: it writes what is missing")  # fmt: skip


def resolve(run: TrainRun, manifest: dict) -> DrafterConfig:
    """The drafter's shape with every null filled from the store's manifest. Raises UserError naming a contradiction."""
    if run.train.loss == "kl" and not manifest["last_hidden"]:
        raise UserError("train.loss", got="kl, but the store has no last hidden states",
                        want="a store extracted with store.last_hidden=true", fix="train.loss=ce_decay")  # fmt: skip
    target_config, layer_ids = manifest["target"]["config"], manifest["layer_ids"]
    config = resolve_drafter(run.drafter, target_config, layer_ids, manifest["mask_token_id"])
    mask = run.target.mask_token_id
    if mask is not None and mask != config.mask_token_id:
        raise UserError("target.mask_token_id", got=mask, want=f"{config.mask_token_id}, with which the store was made",
                        fix=f"target.mask_token_id={config.mask_token_id}")  # fmt: skip
    return config


def plan_order(run: TrainRun, shards: Shards) -> tuple[RowOrder, int, int]:
    """(order, total steps, number of samples that will be cut)."""
    train = run.train
    num_cut = check_lengths(shards.train, shards.lengths, train.row_tokens, train.long_samples)
    order = RowOrder([marker.shard_id for marker in shards.train], shards.lengths, seed=train.seed, epochs=train.epochs,
                     row_tokens=train.row_tokens, global_batch=train.global_batch)  # fmt: skip
    total = min(order.total_steps, train.max_steps) if train.max_steps else order.total_steps
    return order, total, num_cut


@dataclass
class Feed:
    """Where rows come from: a cache of shards, what it is asked for (markers) and the rows of a step, which name shards
    by their number among these. stream_reader.Feed is the same for a stream."""

    cache: ShardCache
    markers: list[Marker]
    step_rows: Callable[[int], list[Row]]

    def stops_when(self, asked: Callable[[], bool]) -> None:
        """Rows on disk are not waited for."""

    def advance(self, step: int) -> None:
        """`step` steps are done. A store on disk has nothing to give up."""

    def close(self, done: bool) -> None:
        """Nobody waits for this reader."""


def open_feed(run: TrainRun, store: ObjectStore, shards: Shards, order: RowOrder, stream: stream_reader.Stream | None,
              step: int) -> Feed | stream_reader.Feed:  # fmt: skip
    """Rows from `step` on."""
    if stream is not None:
        return stream_reader.Feed(store, stream, order, step)
    return Feed(ShardCache(store, cache_dir(run), run.store.cache_bytes), shards.train, order.step_rows)


def cache_dir(run: TrainRun) -> Path:
    """Where downloaded shards and the target's files are kept."""
    return Path(run.store.cache_dir or Path(run.work_dir, "cache"), run.store_name)


def training_facts(run: TrainRun, config: DrafterConfig, manifest: dict, shards: Shards) -> dict:
    """What a checkpoint must agree with to be continued."""
    facts = {f"train.{name}": getattr(run.train, name) for name in _FIXED_FIELDS}
    facts |= {f"drafter.{name}": getattr(config, name) for name in _SHAPE_FIELDS}
    facts |= {
        "drafter.layer_types": layer_types(config),
        "target fingerprint": manifest["target"]["fingerprint"],
        "samples": f"{shards.num_samples} ({digest([[m.sha256 for m in shards.train], shards.lengths])})",
    }
    return facts


def resume_point(run: TrainRun, facts: dict) -> tuple[Path, dict] | None:
    """The checkpoint to continue and its state, or None to start anew. Raises UserError for one that does not fit."""
    if run.train.resume == "never":
        return None
    found = find_resumable(output_dir(run))
    if found is not None:
        check_resumable(found[1], facts, found[0])
    return found


def schedule_changes(run: TrainRun, state: dict) -> list[str]:
    """What may change on resume and did: from there on the run is another one than without the stop."""
    before = state["provenance"]["config"]["train"]
    return [f"train.{name} {before[name]} -> {getattr(run.train, name)}" for name in _FREE_FIELDS
            if before[name] != getattr(run.train, name)]  # fmt: skip


def initial_drafter(run: TrainRun, config: DrafterConfig) -> DFlashDrafter:
    """Fresh seeded weights, or those of train.init_from, in float32. Raises UserError naming what does not fit."""
    if run.train.init_from is None:
        return init_weights(DFlashDrafter(config), run.train.seed)
    return load_initial(run, config, torch.float32)


def load_initial(run: TrainRun, config: DrafterConfig, dtype: torch.dtype | None = None) -> DFlashDrafter:
    """train.init_from as it is on disk (mapped, not read) or in `dtype`; it must compute what `config` says."""
    path = find_checkpoint(run.train.init_from, run.train.init_from)
    model, own = load_drafter(path, config, dtype=dtype)
    differing = {name: (getattr(own, name), getattr(config, name)) for name in _SHAPE_FIELDS}
    modes = lambda c: [(kind, mask_kind(c, kind).window, mask_kind(c, kind).causal) for kind in layer_types(c)]
    differing["layer_types (type, window, causal)"] = (modes(own), modes(config))
    wrong = {name: pair for name, pair in differing.items() if pair[0] is not None and pair[0] != pair[1]}
    if wrong:
        raise UserError(f"train.init_from: {path}", got=", ".join(f"{name}={pair[0]}" for name, pair in wrong.items()),
                        want=", ".join(f"{name}={pair[1]}" for name, pair in wrong.items()),
                        fix="the drafter=... and store that this file was made for")  # fmt: skip
    return model


def make_objective(run: TrainRun, config: DrafterConfig, kernels: Kernels = TORCH) -> Objective:
    train = run.train
    gamma = train.gamma if train.gamma is not None else default_gamma(config.block_size)
    return Objective(train.loss, gamma, train.dpace_alpha, train.head_chunk_blocks, kernels)


# ---------------------------------------------------------------- what it will take


def num_parameters(config: DrafterConfig) -> int:
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())


def checkpoint_bytes(config: DrafterConfig, dtype: str) -> int:
    """One checkpoint: drafter file in the compute dtype, masters and two Adam moments in float32."""
    return num_parameters(config) * (DTYPES[dtype].itemsize + 12) + 10_000_000


def row_bytes(run: TrainRun, manifest: dict) -> int:
    """One packed row in host memory, where eight-bit rows are decoded already."""
    width = (len(manifest["layer_ids"]) + manifest["last_hidden"]) * manifest["hidden_size"]
    dtype = "bfloat16" if manifest["dtype"] == "fp8" else manifest["dtype"]
    return run.train.row_tokens * (width * DTYPES[dtype].itemsize + 25)


def host_bytes(run: TrainRun, manifest: dict, accumulation: int) -> int:
    """Rows of one rank in host memory: a whole accumulation window, and those read ahead."""
    return row_bytes(run, manifest) * (accumulation * run.train.micro_batch + 2 * run.train.prefetch_rows)


def device_bytes(run: TrainRun, config: DrafterConfig, manifest: dict, world_size: int) -> int:
    """Where the model lives, per rank: the same formula as `plan`'s."""
    on_gpu = run.hardware.device != "cpu" and cuda_problem() is None
    tied = bool(manifest["target"]["config"].get("tie_word_embeddings"))
    parts = training_parts(config, run.train, run.zero.stage, world_size, tied=tied, on_gpu=on_gpu)
    return sum(parts.values())
