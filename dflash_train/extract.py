"""extract: capture the target's hidden states for every answered sample and store them as shards.

    python -m dflash_train.extract +data=demo target=smollm2_135m store=s3

Runs mix and regenerate first where their output is missing. What is done has a marker in the store; the rest is done,
so a killed run is resumed by typing the same command. `extract.verify=true` only reads the store back and checks it.
"""

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dflash_train import cli, plan, regenerate
from dflash_train.config import ExtractRun
from dflash_train.data.answers.mix_rows import heldout_ids
from dflash_train.data.chat import Renderer, template_hash
from dflash_train.data.rendering import Row, Rows
from dflash_train.records import HiddenShard
from dflash_train.store import STORES, budget
from dflash_train.store.base import ObjectStore
from dflash_train.store.gather import RowBuffer, gather_rows
from dflash_train.store.resume import is_complete, missing_shards
from dflash_train.store.shard import ShardFacts, put_manifest, read_manifest, scan_markers, write_shard
from dflash_train.store.slices import ShardPlan, plan_batches, plan_hash, plan_shards
from dflash_train.store.staging import staging_folder, staging_parent
from dflash_train.store.target_files import ensure_target_files, has_target_files
from dflash_train.store.upload import Uploader, stop_on_signals
from dflash_train.store.verify import verify_store
from dflash_train.target import TARGETS
from dflash_train.target.base import TargetModel, check_layer_ids, default_layer_ids
from dflash_train.target.canary import check_target
from dflash_train.target.files import TargetFiles
from dflash_train.target.mask_token import check_mask_token
from dflash_train.util.dist import world_size
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, read_jsonl, sha256_file
from dflash_train.util.log import Progress, say
from dflash_train.util.provenance import canonical_json, digest, provenance

ASSUMED_TOKENS, ASSUMED_PROMPT = 1000, 200
"""Tokens a sample, and of them the prompt's, in the estimate made before answers exist; the exact figure follows."""
SPLITS = {"train": "samples.jsonl", "heldout": "heldout.jsonl"}
MUST_AGREE = (
    "target.fingerprint", "layer_ids", "chat_template_hash", "dtype", "last_hidden", "mask_token_id", "plan_hash",
)  # fmt: skip


def main(run: ExtractRun) -> int | None:
    """The whole stage."""
    store = cli.plugin(STORES, run.store.kind, "store.kind").open_store(run.store, run.store_name)
    if run.extract.verify:
        return verify(run, store)
    preflight(run, store)
    target_module = cli.plugin(TARGETS, run.target.kind, "target.kind")
    setup = resolve(run, target_module.prepare(run.target))
    regenerate.ensure_answers(run)
    if is_complete(store, setup.inputs_hash()):
        say(f"every shard is in {store.url} already")
        return finish(run, store)

    rows = render(setup)
    shards = plan_all(setup, rows)
    check_budget(setup, store, shards)
    put_manifest(store, make_manifest(setup, rows, shards), MUST_AGREE)
    todo = missing_shards(store, shards)
    say(f"{len(shards) - len(todo)} of {len(shards)} shards are there; {len(todo)} to do, into {store.url}")
    if todo or not has_target_files(store):
        largest = max((shard.num_tokens for shard in todo), default=0) * setup.token_bytes
        with staging_folder(staging_parent(run.store, largest)) as folder, stop_on_signals() as stop_check:
            target = target_module.load(run.target, run.hardware)
            check_target(target, run.target, ["capture"], setup.layer_ids)
            ensure_target_files(store, target.head(), setup.target_files(), folder)
            extract_shards(setup, store, target, rows.rows, todo, folder, stop_check)
    return finish(run, store)


# ---------------------------------------------------------------- before anything is loaded


def preflight(run: ExtractRun, store: ObjectStore) -> None:
    """Say what will be done and check what it needs; ends the program when something is missing, or after a dry run."""
    if world_size() > 1:
        raise UserError("WORLD_SIZE", got=world_size(), want="1: this version extracts in one process",
                        fix="python -m dflash_train.extract, without a launcher")  # fmt: skip
    answered = (run.answers_dir / "manifest.json").exists()
    todo = [f"extract: hidden states of {run.target.name} for {run.data.name}, into {store.url}"]
    todo += [] if answered else ["no answers yet: regenerate (and mix, where needed) will run first"]
    weights = cli.plugin(TARGETS, run.target.kind, "target.kind").weights(run.target)
    mask_token_id = run.target.mask_token_id
    parameter_bytes = {"bfloat16": 2, "float32": 4}[run.target.dtype]
    weight_bytes = max(weights.num_bytes, (run.target.num_parameters or 0) * parameter_bytes)
    checks = [
        plan.Check("answers", True, str(run.answers_dir) if answered else "will be made first"),
        plan.Check("target", weights.ok, weights.detail, weights.fix),
        plan.Check("mask token", mask_token_id is not None, f"target.mask_token_id={mask_token_id}",
                   "target.mask_token_id=<a row of the embedding that never occurs in text>"),
        plan.check_device(run),
        plan.check_memory(weight_bytes),
        *plan.check_gpu_memory(run, weight_bytes, "a smaller target, or hardware=cpu"),
        plan.check_store(store),
        check_storage(run, store, answered),
    ]  # fmt: skip
    if weights.download_bytes:
        checks.append(plan.check_disk(Path.home(), weights.download_bytes + weights.num_bytes))
    plan.preflight(run, checks, todo)


def check_storage(run: ExtractRun, store: ObjectStore, answered: bool) -> plan.Check:
    """An estimate while there are no answers to count: a recipe of a million rows is refused before they are made."""
    takes = [source.take for source in run.data.sources.values()]
    samples = run.data.total or (sum(takes) if None not in takes else None)
    if answered or samples is None or run.target.hidden_size is None:
        return plan.Check("storage", True, "counted exactly after rendering, before the weights are loaded")
    samples = min(samples, run.limit or samples)
    layers = len(run.extract.layer_ids or range(run.extract.num_taps))
    longest = ASSUMED_PROMPT + run.data.answers.max_new_tokens
    tokens = samples * min(ASSUMED_TOKENS, run.extract.max_tokens, longest)
    line = budget.storage_line(run.target.hidden_size, layers, run.store, samples, tokens)
    limit = budget.max_bytes(run.store, store, 0)
    ways_out = budget.too_much(tokens * budget.row_bytes(run.target.hidden_size, layers, run.store), limit)
    detail = f"{line} (estimate); at most {human_bytes(limit[0])} ({limit[1]})"
    return plan.Check("storage", ways_out is None, detail, ways_out or "")


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

    def inputs_hash(self) -> str:
        """Names everything the shards follow from, without rendering: a finished store is recognized in seconds."""
        answers = [sha256_file(self.run.answers_dir / name) for name in SPLITS.values()]
        return digest([self.facts(), self.choices(), answers])

    def shard_provenance(self) -> dict:
        """Who made a shard. Only what decides its content: it must not depend on the worker or its folders."""
        facts = {key: value for key, value in self.facts().items() if key != "target"}
        return provenance(self.choices(), target_fingerprint=self.files.spec.fingerprint, **facts)

    def choices(self) -> dict:
        """The configuration that decides what is in a shard."""
        run = self.run
        extract = asdict(replace(run.extract, verify=False))
        return {"data": run.data.name, "seed": run.data.seed, "target_dtype": run.target.dtype,
                "shard_bytes": run.store.shard_bytes, "extract": extract}  # fmt: skip

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
    return Setup(run, files, layer_ids, check_mask_token(run.target.mask_token_id, files))


# ---------------------------------------------------------------- the plan


def render(setup: Setup) -> Rows:
    """Every answered sample as the target reads it, cut to extract.max_tokens."""
    rows, max_tokens = Rows(heldout_ids(setup.run.mix_dir)), setup.run.extract.max_tokens
    renderer = Renderer(setup.files.tokenizer)
    for split, name in SPLITS.items():
        rows.add(read_jsonl(setup.run.answers_dir / name), split, renderer, max_tokens,
                 setup.run.data.answers.min_answer_tokens)  # fmt: skip
    say(f"rendered {len(rows.rows):,} samples; {rows.num_cut:,} cut to {max_tokens:,} tokens; "
        f"{rows.dropped.total():,} dropped {dict(rows.dropped) or ''}")  # fmt: skip
    if not rows.of("train"):
        raise UserError(str(setup.run.answers_dir), got="no sample with a supervised token", want="at least one")
    return rows


def plan_all(setup: Setup, rows: Rows) -> list[ShardPlan]:
    """Train shards, then held-out shards."""
    shards = []
    for split in SPLITS:
        lengths = {sample_id: len(row) for sample_id, row in rows.of(split).items()}
        shards += plan_shards(split, lengths, seed=setup.run.data.seed, window_samples=setup.run.extract.window_samples,
                              shard_tokens=max(1, setup.run.store.shard_bytes // setup.token_bytes))  # fmt: skip
    return shards


def check_budget(setup: Setup, store: ObjectStore, shards: list[ShardPlan]) -> None:
    """Say what the store will take; refuse what is more than store.max_bytes."""
    tokens = sum(shard.num_tokens for shard in shards)
    samples = sum(len(shard.sample_ids) for shard in shards)
    say(budget.storage_line(setup.hidden_size, len(setup.layer_ids), setup.run.store, samples, tokens))
    present = sum(size for _, size in store.list("shards/"))
    budget.refuse_too_much(tokens * setup.token_bytes, budget.max_bytes(setup.run.store, store, present))


def make_manifest(setup: Setup, rows: Rows, shards: list[ShardPlan]) -> dict:
    """What the store is made from, written before the first shard."""
    hashes = {sample_id: row.content_hash for sample_id, row in rows.rows.items()}
    return setup.facts() | {
        "shards": {split: sum(shard.shard_id.startswith(split) for shard in shards) for split in SPLITS},
        "samples": {split: len(rows.of(split)) for split in SPLITS},
        "tokens": {split: sum(map(len, rows.of(split).values())) for split in SPLITS},
        "supervised": {split: int(sum(row.loss_mask.sum() for row in rows.of(split).values())) for split in SPLITS},
        "num_cut": rows.num_cut,
        "dropped": dict(rows.dropped),
        "plan_hash": plan_hash(shards, hashes),
        "inputs_hash": setup.inputs_hash(),
        "provenance": provenance(cli.config_dict(setup.run), seed=setup.run.data.seed),
    }


# ---------------------------------------------------------------- the work


def extract_shards(setup: Setup, store: ObjectStore, target: TargetModel, rows: dict[str, Row], todo: list[ShardPlan],
                   folder: Path, stop_check) -> None:  # fmt: skip
    """Capture, stage and upload every shard of `todo`; all of them are uploaded when this returns.

    Two buffers: while one shard is written to the staging folder, the next one is captured.
    """
    progress = Progress("extract", sum(len(shard.sample_ids) for shard in todo), "samples")
    capacity = max((shard.num_tokens for shard in todo), default=0)
    width = setup.hidden_size * (len(setup.layer_ids) + setup.run.store.last_hidden)
    dtype = getattr(torch, setup.run.store.dtype)
    buffers = [RowBuffer(capacity, width, dtype, target.device) for _ in todo[:2]]
    writing: list[Future | None] = [None for _ in buffers]
    with Uploader(store, folder, stop_check=stop_check) as uploader, ThreadPoolExecutor(1) as writer:
        for i, shard in enumerate(todo):
            if store.size(f"markers/{shard.shard_id}.json") is not None:
                say(f"{shard.shard_id}: another worker has done it")
                progress.update(len(shard.sample_ids))
                continue
            uploader.reserve(shard.num_tokens * setup.token_bytes)
            if writing[i % 2]:
                writing[i % 2].result()  # the buffer is free once its last shard is on file
            capture_shard(setup, target, rows, shard, buffers[i % 2], progress, stop_check)
            writing[i % 2] = writer.submit(stage, setup, rows, shard, buffers[i % 2].rows(), folder, uploader)
        for future in filter(None, writing):
            future.result()
    progress.close()


def capture_shard(setup: Setup, target: TargetModel, rows: dict[str, Row], shard: ShardPlan, buffer: RowBuffer,
                  progress: Progress, stop_check) -> None:  # fmt: skip
    """The loop: a batch of similar lengths -> forward -> valid rows in one tensor -> one copy into host memory."""
    buffer.clear()
    for batch in plan_batches(shard.lengths, setup.run.extract.batch_tokens):
        stop_check()
        lengths = torch.tensor(shard.lengths[batch])
        padded = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
        for i, sample_id in enumerate(shard.sample_ids[batch]):
            padded[i, : lengths[i]] = torch.from_numpy(rows[sample_id].token_ids)
        features = target.capture(padded.to(target.device), setup.layer_ids, setup.run.store.last_hidden)
        captured = gather_rows(features, lengths.to(target.device), buffer.memory.dtype)
        buffer.put(captured)
        progress.update(len(lengths), tokens=captured.shape[0], MB=captured.nbytes / 1e6)


def stage(setup: Setup, rows: dict[str, Row], shard: ShardPlan, captured: torch.Tensor, folder: Path,
          uploader: Uploader) -> None:  # fmt: skip
    """Captured rows [T, width] as a staged file, handed to the uploader. Rows that are not finite raise UserError."""
    width = setup.hidden_size * len(setup.layer_ids)
    content = HiddenShard(
        list(shard.sample_ids),
        torch.from_numpy(np.concatenate([rows[sample_id].token_ids for sample_id in shard.sample_ids])),
        torch.from_numpy(np.concatenate([rows[sample_id].loss_mask for sample_id in shard.sample_ids])),
        torch.tensor([0, *shard.lengths]).cumsum(0),
        captured[:, :width],
        captured[:, width:] if setup.run.store.last_hidden else None,
        setup.shard_provenance(),
    )
    path = folder / f"{shard.shard_id}.safetensors"
    write_shard(path, content)
    uploader.submit(path, ShardFacts.of(shard.shard_id, content), shard.num_tokens * setup.token_bytes)


# ---------------------------------------------------------------- the end


def finish(run: ExtractRun, store: ObjectStore) -> int | None:
    """Count what is in the store; non-zero when a shard is missing."""
    manifest = read_manifest(store)
    valid, _ = scan_markers(store)
    want = sum(manifest["shards"].values())
    samples, tokens = sum(len(m.sample_ids) for m in valid), sum(m.num_tokens for m in valid)
    supervised, total = sum(m.num_supervised for m in valid), sum(m.bytes for m in valid)
    say(f"{len(valid)} of {want} shards in {store.url}: {samples:,} samples, {tokens:,} tokens "
        f"({supervised:,} supervised), {human_bytes(total)}")  # fmt: skip
    if len(valid) != want:
        say("some shards are missing: type the same command again")
        return 1
    say("next: " + cli.next_command("train", run))
    return None


def verify(run: ExtractRun, store: ObjectStore) -> int:
    """Read everything back; 1 when something is bad."""
    say(f"verify: reading back every shard in {store.url}")
    with tempfile.TemporaryDirectory() as folder:
        report = verify_store(store, folder)
    for line in report.lines():
        say(line)
    return 1 if report.problems else 0


if __name__ == "__main__":
    cli.main("extract", main)
