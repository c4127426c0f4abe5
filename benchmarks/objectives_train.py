"""One training run of `objectives.py`: training's own rows, blocks, drafter and schedule, any objective, plain AdamW.

Nothing but the objective (and, for fp8, the states) depends on the arm; the digests in run.json show it: of the initial
weights and of the samples in their order. Weights and moments are float32 beside a model in `train.dtype`, as under
ZeRO; gradients of a step are summed in float32 and divided once.
"""

import hashlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from objectives_losses import TrainedBy, make_objective
from objectives_plan import ARMS, BASE, Plan, Spec
from torch import Tensor, nn

from dflash_train import cli
from dflash_train.config import DrafterConfig, TrainConfig, TrainRun
from dflash_train.drafter.dflash import block_hidden, resolve_attention
from dflash_train.drafter.files import load_drafter, save_drafter
from dflash_train.drafter.walk import evaluate_samples
from dflash_train.engine import inputs
from dflash_train.engine.heldout import heldout_sample
from dflash_train.engine.schedule import learning_rate, progress_at
from dflash_train.engine.window import to_device
from dflash_train.engine.zero import parameter_groups
from dflash_train.records import DraftBatch, TargetHead
from dflash_train.store import STORES
from dflash_train.store.base import ObjectStore
from dflash_train.store.fp8 import quantize
from dflash_train.store.loader import Prefetcher, RowReader, ShardCache
from dflash_train.store.markers import Marker
from dflash_train.store.order import Row, rank_share
from dflash_train.store.shard import (
    ShardFacts,
    fetch_shard,
    list_markers,
    publish_shard,
    put_manifest,
    read_manifest,
    read_shard,
    write_shard,
)
from dflash_train.store.target_files import read_target_head
from dflash_train.util.device import device_name, pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, write_json
from dflash_train.util.log import say
from dflash_train.util.provenance import code_version, provenance, stable_hash

COPIERS = 4
"""Shards that are copied at a time."""
WALK_BLOCKS = 128
"""Positions of a sample that the walk drafts from at a time."""

# ---------------------------------------------------------------- what a run reads


@dataclass
class Data:
    """An opened store: what training and the walk need of it."""

    run: TrainRun
    store: ObjectStore
    manifest: dict
    cache: ShardCache
    config: DrafterConfig


def open_data(plan: Plan, spec: Spec) -> Data:
    run = plan.train_run(spec)
    store = cli.plugin(STORES, run.store.kind, "store.kind").open_store(run.store, run.store_name)
    manifest = read_manifest(store)
    cache = ShardCache(store, Path(run.store.root, "cache"), run.store.cache_bytes)
    return Data(run, store, manifest, cache, inputs.resolve(run, manifest))


def read_head(plan: Plan, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """From the states' own store: the one in eight bits has no copy."""
    return read_target_head(open_data(plan, Spec(BASE, plan.lrs[0], 0)).store).to(device, dtype)


def copy_in_eight_bits(plan: Plan) -> None:
    """The same train shards with their rows as codes and scales, sample for sample, so that the order stays too."""
    source, target = (open_store(plan, fp8) for fp8 in (False, True))
    manifest, markers = read_manifest(source), list_markers(source, "train")
    have = {marker.shard_id for marker in list_markers(target, "train")}

    def copy(marker: Marker) -> None:
        path = fetch_shard(source, marker, plan.work / "copy")
        shard = read_shard(path)
        codes, scales = quantize(shard.hidden, len(manifest["layer_ids"]))
        eight = replace(shard, hidden=codes, hidden_scale=scales)
        written = plan.work / "copy" / f"{marker.shard_id}-fp8.safetensors"
        write_shard(written, eight)
        publish_shard(target, written, ShardFacts.of(marker.shard_id, eight))
        written.unlink()

    with ThreadPoolExecutor(COPIERS) as pool:
        list(pool.map(copy, (marker for marker in markers if marker.shard_id not in have)))
    counts = {name: {**manifest[name], "heldout": 0} for name in ("samples", "tokens")}
    counts["shards"] = {"train": len(markers), "heldout": 0}
    put_manifest(target, manifest | counts | {"dtype": "fp8"}, ("target.fingerprint", "shards.train"))


def open_store(plan: Plan, fp8: bool) -> ObjectStore:
    run = plan.train_run(Spec("fp8" if fp8 else BASE, plan.lrs[0], 0))
    return cli.plugin(STORES, run.store.kind, "store.kind").open_store(run.store, run.store_name)


# ---------------------------------------------------------------- weights


class Weights:
    """A model that computes in `dtype` beside its float32 weights and their AdamW."""

    def __init__(self, initial: nn.Module, train: TrainConfig, device: torch.device):
        self.exact = initial.to(device)
        self.model = deepcopy(initial).to(inputs.DTYPES[train.dtype])
        self.clip = train.clip
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.exact, train.weight_decay), betas=(train.beta1, train.beta2),
            fused=device.type == "cuda",
        )  # fmt: skip

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.exact.parameters(), self.model.parameters(), strict=True)

    def collect(self) -> None:
        """Add a micro-batch's gradients to the step's."""
        for exact, rounded in self.pairs():
            exact.grad = rounded.grad.float() if exact.grad is None else exact.grad + rounded.grad
            rounded.grad = None

    @torch.no_grad()
    def step(self, denominator: Tensor, lr: float) -> None:
        for exact, _ in self.pairs():
            exact.grad /= denominator
        nn.utils.clip_grad_norm_(self.exact.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for exact, rounded in self.pairs():
            rounded.copy_(exact)


def weights_digest(model: nn.Module) -> str:
    """Of the bytes of all weights."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- the run


def finished(plan: Plan, spec: Spec) -> dict | None:
    """run.json of a run that is done. Raises UserError where it was another experiment's."""
    path = plan.folder(spec) / "run.json"
    if not path.exists():
        return None
    record, facts = read_json(path), plan.facts(spec)
    differing = [name for name, value in facts.items() if record["facts"].get(name) != value]
    if differing:
        raise UserError(str(path), got=", ".join(f"{name}={record['facts'].get(name)}" for name in differing),
                        want=", ".join(f"{name}={facts[name]}" for name in differing),
                        fix="another --work, or delete that folder")  # fmt: skip
    return record


def train_one(plan: Plan, spec: Spec) -> None:
    """Train, save the drafter, walk over the samples that choose a learning rate; run.json comes last."""
    if finished(plan, spec):
        return
    data, start = open_data(plan, spec), time.monotonic()
    train, config = data.run.train, data.config
    device = pick_device(data.run.hardware.device, plan.threads)
    shards = inputs.find_shards(data.store, data.manifest, data.run.limit)
    order, total_steps, num_cut = inputs.plan_order(data.run, shards)
    if total_steps != plan.steps:
        raise UserError("steps", got=f"{total_steps} are all that train.epochs gives", want=plan.steps)
    head = read_head(plan, device, inputs.DTYPES[train.dtype])
    attention = resolve_attention(train.attention, device, training=True)
    initial = inputs.initial_drafter(data.run, config)
    record = {"initial": weights_digest(initial), "samples": [], "blocks": 0, "losses": []}
    weights, objective = Weights(initial, train, device), make_objective(ARMS[spec.arm], data.run, config, head)
    micro_batches = (rows for step in range(plan.steps)
                     for rows in rank_share(order.step_rows(step), 0, 1, train.micro_batch))  # fmt: skip
    prefetcher = Prefetcher(RowReader(data.cache, shards.train, train.row_tokens), micro_batches,
                            math.ceil(train.prefetch_rows / train.micro_batch), pin=device.type == "cuda")  # fmt: skip
    batches = iter(prefetcher)
    torch.manual_seed(spec.seed)  # of the peers' draws of anchors
    begun = []
    try:
        for step in range(plan.steps):
            begun.append(time.monotonic())
            loss = train_step(weights, objective, batches, train, config, head, attention, step, plan.steps, record)
            if (step + 1) % max(1, plan.steps // 8) == 0:
                record["losses"].append([step + 1, float(loss)])
                say(f"{spec.name}: step {step + 1} of {plan.steps}, its loss {float(loss):.3f}")
                if not math.isfinite(float(loss)):
                    raise UserError(f"{spec.name}: loss", got=float(loss), want="a finite number", fix="lower --lrs")
    finally:
        prefetcher.close()
    train_s, late = time.monotonic() - start, begun[2 * plan.steps // 3 :]
    step_s = (time.monotonic() - late[0]) / len(late)  # without what is compiled and fetched at first
    facts = provenance(
        cli.config_dict(data.run), step=plan.steps, seed=spec.seed, layer_ids=data.manifest["layer_ids"],
        target={key: data.manifest["target"][key] for key in ("name", "fingerprint")},
        chat_template_hash=data.manifest["chat_template_hash"],
    )  # fmt: skip
    save_drafter(plan.folder(spec) / "drafter", weights.exact, config, facts)
    chosen_on = walk(plan, weights.model, config, head, device, choose=True)
    samples = hashlib.sha256("\n".join(record.pop("samples")).encode()).hexdigest()[:16]
    write_json(plan.folder(spec) / "run.json", {
        "facts": plan.facts(spec), **record, "samples": samples, "cut_samples": num_cut, "choose": chosen_on,
        "train_s": train_s, "step_s": step_s, "all_s": time.monotonic() - start, "device": device_name(device),
        "code_version": code_version(), "torch": torch.__version__, "dtype": train.dtype,
    })  # fmt: skip


def train_step(weights: Weights, objective: TrainedBy, batches: Iterator[tuple[list[Row], DraftBatch]],
               train: TrainConfig, config: DrafterConfig, head: TargetHead, attention: str, step: int, total: int,
               record: dict) -> Tensor:  # fmt: skip
    """One optimizer step over global_batch rows -> its loss."""
    device = head.head.device
    numerator = denominator = torch.zeros((), device=device)
    for _ in range(train.global_batch // train.micro_batch):
        rows, batch = next(batches)
        blocks = objective.draw(rows, batch)
        record["samples"] += [name for names in batch.sample_ids for name in names]
        record["blocks"] += int(blocks.valid.sum())
        batch, blocks = batch.to(device), to_device(blocks, device)
        hidden_BNSD = block_hidden(weights.model, config, head, batch, blocks, attention)
        part, weight = objective.terms(hidden_BNSD, batch, blocks)
        part.backward()
        weights.collect()
        numerator, denominator = numerator + part.detach(), denominator + weight
    peak = learning_rate(progress_at(step, total), train.lr, train.warmup_ratio, train.min_lr_ratio)
    weights.step(denominator, peak)
    return numerator / denominator


# ---------------------------------------------------------------- the walk


def walk(plan: Plan, model: nn.Module, config: DrafterConfig, head: TargetHead, device: torch.device, *,
         choose: bool) -> dict[str, list[int]]:  # fmt: skip
    """Held-out sample -> lengths of its rounds, on 16-bit states whatever the drafter was trained on.

    By SDPA, which compiles nothing: flex would, for every length of sample, in every process."""
    data = open_data(plan, Spec(BASE, plan.lrs[0], 0))
    refs = heldout_refs(plan, data, choose=choose)
    objective = replace(inputs.make_objective(data.run, config), chunk_blocks=WALK_BLOCKS)
    samples = (heldout_sample(data.cache.get(marker), j) for _, marker, j in refs)
    stats = evaluate_samples(model, config, head, samples, objective=objective, attention="sdpa", device=device,
                             stop_ids=data.manifest["target"]["stop_ids"])  # fmt: skip
    return {name: rounds for (name, _, _), rounds in zip(refs, stats.round_lengths, strict=True)}


def heldout_refs(plan: Plan, data: Data, *, choose: bool) -> list[tuple]:
    """(sample id, marker, index) of the samples that choose a learning rate, or of the others, which compare.

    By a hash of the id, so that neither lot has the shorter answers. Raises UserError where there are too few."""
    every = [(name, marker, j) for marker in list_markers(data.store, "heldout")
             for j, name in enumerate(marker.sample_ids)]  # fmt: skip
    every.sort(key=lambda ref: (stable_hash("objectives", ref[0]), ref[0]))
    if len(every) < plan.choose + plan.walk:
        raise UserError("held-out samples", got=len(every), want=f"{plan.choose} + {plan.walk}",
                        fix="a larger data.heldout_fraction, or --walk")  # fmt: skip
    return every[: plan.choose] if choose else every[plan.choose : plan.choose + plan.walk]


def walk_one(plan: Plan, spec: Spec) -> None:
    """walk.json of a finished run: the samples that compare."""
    path = plan.folder(spec) / "walk.json"
    if path.exists() and len(read_json(path)) == plan.walk:
        return
    run = plan.train_run(spec)
    device, dtype = pick_device(run.hardware.device, plan.threads), inputs.DTYPES[run.train.dtype]
    model, config = load_drafter(plan.folder(spec) / "drafter", dtype=dtype, device=device)
    head = read_head(plan, device, dtype)
    write_json(path, walk(plan, model, config, head, device, choose=False))
