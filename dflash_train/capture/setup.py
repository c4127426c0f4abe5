"""What config and the target's files decide together, before weights are loaded: layers, plan, manifest."""

import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path

from dflash_train.capture.rows import SPLITS, RenderedRows
from dflash_train.config import ExtractRun
from dflash_train.data.chat import template_hash
from dflash_train.planning.machine import gpus_at_hand
from dflash_train.store import budget
from dflash_train.store.slices import ShardPlan, plan_hash, plan_shards
from dflash_train.target.base import check_layer_ids, default_layer_ids
from dflash_train.target.files import TargetFiles
from dflash_train.target.mask_token import check_mask_token
from dflash_train.target.sharded_load import check_split
from dflash_train.util.io import sha256_file
from dflash_train.util.log import say
from dflash_train.util.provenance import canonical_json, digest, provenance

MUST_AGREE = (
    "target.fingerprint", "layer_ids", "chat_template_hash", "dtype", "last_hidden", "mask_token_id", "plan_hash",
)  # fmt: skip
"""Entries of the manifest in which every run into one store must agree."""
DECIDES = ("layer_ids", "num_taps", "max_tokens", "batch_tokens", "window_samples")
"""Keys of `extract` that decide what is in a shard; the others say who makes it and how it is watched."""

PACKAGES = ("torch", "transformers", "triton", "flash-linear-attention")


@dataclass(frozen=True)
class Setup:
    """What config and target's files decide together."""

    run: ExtractRun
    files: TargetFiles
    layer_ids: tuple[int, ...]
    mask_token_id: int

    @property
    def hidden_size(self) -> int:
        return self.files.spec.hidden_size

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a shard."""
        return budget.row_bytes(self.hidden_size, len(self.layer_ids), self.run.store) + budget.TOKEN_BYTES

    def facts(self) -> dict:
        """What a later run, and training, must agree with."""
        spec = self.files.spec
        target = {"name": self.run.target.name, "fingerprint": spec.fingerprint, "config": self.config(),
                  "stop_ids": list(spec.stop_ids)}  # fmt: skip
        return {
            "target": target,
            "layer_ids": list(self.layer_ids),
            "hidden_size": self.hidden_size,
            "dtype": self.run.store.dtype,
            "last_hidden": self.run.store.last_hidden,
            "mask_token_id": self.mask_token_id,
            "chat_template_hash": template_hash(self.files.tokenizer),
        }

    def config(self) -> dict:
        """config.json of the target's text part, as plain JSON."""
        config = self.files.hf_config.get_text_config().to_dict()
        return {key: value for key, value in config.items() if key != "_name_or_path"}

    @cached_property
    def answers(self) -> list[str]:
        """Hashes of the answer files, in the order of SPLITS. They can be many GB."""
        return [sha256_file(self.run.answers_dir / name) for name in SPLITS.values()]

    def inputs_hash(self) -> str:
        """Names everything the shards follow from, without rendering: a finished store is recognized in seconds."""
        return digest([self.facts(), self.choices(), self.answers])

    def shard_provenance(self) -> dict:
        """Who made a shard. Only what decides its content: it must not depend on the worker or its folders."""
        facts = {key: value for key, value in self.facts().items() if key != "target"}
        return provenance(self.choices(), target_fingerprint=self.files.spec.fingerprint, **facts)

    def choices(self) -> dict:
        """The configuration that decides what is in a shard."""
        run = self.run
        return {"data": run.data.name, "seed": run.data.seed, "target_dtype": run.target.dtype,
                "shard_bytes": run.store.shard_bytes,
                "extract": {key: vars(run.extract)[key] for key in DECIDES}}  # fmt: skip

    def target_files(self) -> dict[str, bytes]:
        """The small files training and evaluation need: text config, tokenizer, chat template."""
        with tempfile.TemporaryDirectory() as folder:
            self.files.tokenizer.save_pretrained(folder)
            small = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        return small | {"config.json": (canonical_json(self.config()) + "\n").encode()}


def resolve(run: ExtractRun, files: TargetFiles) -> Setup:
    """Layer ids and mask token, checked against the target's files."""
    ids, num_layers = run.extract.layer_ids, files.spec.num_layers
    layer_ids = tuple(ids) if ids is not None else default_layer_ids(num_layers, run.extract.num_taps)
    check_layer_ids(layer_ids, num_layers)
    if run.extract.gpus_per_worker > 1:
        check_split(files.hf_config.get_text_config(), run.extract.gpus_per_worker)
    return Setup(run, files, layer_ids, check_mask_token(run.target.mask_token_id, files))


def plan_all(setup: Setup, rows: RenderedRows) -> list[ShardPlan]:
    """Train shards, then held-out shards."""
    shards = []
    for split in SPLITS:
        lengths = {rows.sample_ids[row]: rows.length(row) for row in rows.of(split)}
        shards += plan_shards(split, lengths, seed=setup.run.data.seed, window_samples=setup.run.extract.window_samples,
                              shard_tokens=max(1, setup.run.store.shard_bytes // setup.token_bytes))  # fmt: skip
    return shards


def make_manifest(setup: Setup, rows: RenderedRows, shards: list[ShardPlan]) -> dict:
    """What the store is made from, written before the first shard."""
    return setup.facts() | {
        "shards": {split: sum(shard.shard_id.startswith(split) for shard in shards) for split in SPLITS},
        "samples": {split: len(rows.of(split)) for split in SPLITS},
        "tokens": {split: rows.num_tokens(split) for split in SPLITS},
        "supervised": rows.num_supervised,
        "num_cut": rows.num_cut,
        "dropped": rows.dropped,
        "plan_hash": plan_hash(shards, dict(zip(rows.sample_ids, rows.content_hashes, strict=True))),
        "inputs_hash": setup.inputs_hash(),
        "computed_with": computed_with(setup.run),
        "provenance": provenance(asdict(setup.run), seed=setup.run.data.seed),
    }


def computed_with(run: ExtractRun) -> dict[str, str]:
    """What hidden rows depend on by rounding: ids, masks and order are the same whatever stands here."""
    versions = {found.name.replace("_", "-"): found.version for found in distributions()}
    gpus = gpus_at_hand() if run.hardware.device != "cpu" else []
    return {
        "device": ", ".join(sorted({gpu.name for gpu in gpus})) or "CPU",
        "target.dtype": run.target.dtype,
        "target.kernels": run.target.kernels,
        "extract.gpus_per_worker": str(run.extract.gpus_per_worker),
        **{name: versions[name] for name in PACKAGES if name in versions},
    }


def say_rounding(manifest: dict, run: ExtractRun) -> None:
    """One line where the store's first run computed otherwise than this one."""
    here, there = computed_with(run), manifest.get("computed_with", {})
    if differences := [f"{key} {there[key]}, now {here.get(key)}" for key in there if there[key] != here.get(key)]:
        say(f"the store was begun with {'; '.join(differences)}: ids, masks and order stay byte-identical, new hidden "
            "rows differ from what the first run would have made by rounding")  # fmt: skip
