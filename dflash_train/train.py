"""Train a drafter on a store of hidden states: shards -> packed rows -> DeepSpeed steps -> z-lab folders.

    check     store, shards, batch numbers, drafter shape, resume point, disk, memory: one table, before anything loads
    loop      a window of micro-batches -> its denominator over all ranks -> forward, loss, backward -> one step
    beside    held-out acceptance every eval_every steps, a checkpoint every save_every, metrics.jsonl always
    end       last/ (newest weights) and best/ (longest held-out acceptance) under train.output_dir

With train.max_minutes the schedule follows the clock too; a resumed run equals an unbroken one only without it.
"""

import math
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_train import cli, plan
from dflash_train.config import DrafterConfig, TrainRun
from dflash_train.drafter.dflash import resolve_attention
from dflash_train.drafter.kernels import resolve_kernels
from dflash_train.engine import inputs, zero
from dflash_train.engine.agree import same_everywhere
from dflash_train.engine.checkpoint import TRAINING, layout_change, save_checkpoint
from dflash_train.engine.heldout import evaluate_heldout
from dflash_train.engine.monitoring import Metrics, StepLog, stop_signals
from dflash_train.engine.results import Results
from dflash_train.engine.schedule import learning_rate, progress_at
from dflash_train.engine.window import next_window, train_window
from dflash_train.store import STORES, stream_reader
from dflash_train.store.base import ObjectStore
from dflash_train.store.loader import Prefetcher, RowReader
from dflash_train.store.order import RowOrder, rank_share
from dflash_train.store.shard import read_manifest
from dflash_train.store.stream import StreamStore
from dflash_train.store.target_files import read_target_head
from dflash_train.util import dist
from dflash_train.util.device import cpu_has_bfloat16, cuda_problem, pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import duration, say, table
from dflash_train.util.provenance import provenance


@dataclass(frozen=True)
class Inputs:
    """Everything that is known before anything is loaded."""

    store: ObjectStore
    manifest: dict
    shards: inputs.Shards
    config: DrafterConfig
    order: RowOrder
    total_steps: int
    accumulation: int
    resume: tuple[Path, dict] | None
    stream: stream_reader.Stream | None = None


def main(run: TrainRun) -> int:
    given = check(run)
    if given.resume and finished(run, given, *(given.resume[1][key] for key in ("step", "elapsed_s"))):
        say(f"training is complete: {given.resume[0]}. More of it: train.epochs, train.max_steps or train.max_minutes")
        return 0
    device = pick_device(run.hardware.device, run.hardware.num_threads)
    if device.type == "cpu" and run.hardware.num_threads is None:  # ranks that share cores must not fight for them
        torch.set_num_threads(max(1, torch.get_num_threads() // dist.world_size()))
    zero.start(device)
    code = 0
    try:
        Trainer(run, given, device).train()
    except UserError as error:  # raised on every rank alike, so all of them reach the end below
        print(f"\n{error}", file=sys.stderr, flush=True)
        code = 1
    dist.shutdown()
    return code


# ---------------------------------------------------------------- before anything is loaded


def check(run: TrainRun) -> Inputs:
    """Print the table of needs; exits 2 when one is missing. Raises UserError for a checkpoint that does not fit."""
    checks = [plan.check_device(run)]

    def need(name: str, action, detail) -> object:
        try:
            value = action()
        except UserError as error:
            detail = f"{error.field}: {error.got}" + (f"; want {error.want}" if error.want else "")
            checks.append(plan.Check(name, False, detail, error.fix or ""))
            return None
        checks.append(plan.Check(name, True, detail(value)))
        return value

    train, world = run.train, dist.world_size()
    accumulation = need("batch", lambda: train.check_world(world), lambda n:
                        f"{train.global_batch} rows = {world} rank(s) x {n} x {train.micro_batch} rows")  # fmt: skip
    store = cli.plugin(STORES, run.store.kind, "store.kind").open_store(run.store, run.store_name)
    if isinstance(store, StreamStore) and not run.dry_run:
        stream_reader.wait_for_extraction(store)
        if dist.is_main():
            store.lock("training")
    manifest = need("store", lambda: read_manifest(store), lambda m: f"{store.url}: {m['samples']['train']:,} samples")
    if manifest is None:
        checks[-1] = plan.Check("store", False, checks[-1].detail, cli.next_command("extract", run))
        plan.preflight(run, checks, [])
    shards = need("shards", lambda: inputs.find_shards(store, manifest, run.limit), lambda s:
                  f"{len(s.train)} train, {len(s.heldout)} held-out")  # fmt: skip
    need("target", lambda: inputs.check_target_files(store, manifest), lambda _: manifest["target"]["name"])
    config = need("drafter", lambda: inputs.resolve(run, manifest), lambda c:
                  f"{inputs.num_parameters(c):,} parameters, B={c.block_size}, taps {c.target_layer_ids}")  # fmt: skip
    ordered = shards and need("rows", lambda: inputs.plan_order(run, shards), lambda o:
                              f"{o[0].total_rows:,} of {train.row_tokens} tokens, {o[2]} samples cut")  # fmt: skip
    stream = ordered and isinstance(store, StreamStore) and need("ring", lambda: stream_reader.plan_stream(
        store, ordered[0], train.seed, ordered[1]), lambda s: f"at least {human_bytes(s.uses.need_bytes)} are needed; "
        "every epoch is extracted anew")  # fmt: skip
    if config and train.init_from:
        need("init_from", lambda: inputs.load_initial(run, config), lambda _: train.init_from)
    if None in (accumulation, shards, config, ordered, stream):
        plan.preflight(run, checks, [])
    checks += resource_checks(run, config, manifest, accumulation)
    resume = inputs.resume_point(run, inputs.training_facts(run, config, manifest, shards))
    order, total_steps, _ = ordered
    given = Inputs(store, manifest, shards, config, order, total_steps, accumulation, resume, stream or None)
    plan.preflight(run, checks, todo(run, given))
    return given


def resource_checks(run: TrainRun, config: DrafterConfig, manifest: dict, accumulation: int) -> list[plan.Check]:
    """Disk for checkpoints, memory of the host and of the GPU."""
    one = inputs.checkpoint_bytes(config, run.train.dtype)
    checks = [plan.check_disk(inputs.output_dir(run), one * (run.train.keep_checkpoints + 2),
                              "free some space, train.keep_checkpoints=1, or train.output_dir=...")]  # fmt: skip
    device, world = pick_device(run.hardware.device), dist.world_size()
    host = inputs.host_bytes(run, manifest, accumulation)
    on_device = inputs.device_bytes(run, config, manifest, world)
    if device.type == "cpu":
        return [*checks, plan.check_memory(host + on_device)]
    total = torch.cuda.mem_get_info(device)[1]
    return [*checks, plan.check_memory(host), plan.Check(
        "GPU memory", total >= on_device, f"{human_bytes(total)} on the card, about {human_bytes(on_device)} needed",
        "zero=zero3, or a smaller train.micro_batch, train.num_anchors or train.head_chunk_blocks")]  # fmt: skip


def todo(run: TrainRun, given: Inputs) -> list[str]:
    train = run.train
    limit = f", at most {train.max_minutes:g} minutes" if train.max_minutes else ""
    lines = [f"train {given.config.name} for {given.manifest['target']['name']}: {given.total_steps:,} steps of "
             f"{train.global_batch} rows ({train.epochs:g} epochs of {given.shards.num_samples:,} samples){limit}, "
             f"ZeRO-{run.zero.stage}, {train.dtype}; results in {inputs.output_dir(run)}"]  # fmt: skip
    if given.resume:
        lines.append(f"resume from {given.resume[0]}, step {given.resume[1]['step']:,}")
        layout = layout_change(given.resume[1], dist.world_size(), run.zero.stage)
        lines += [layout] if layout else []
        changes = inputs.schedule_changes(run, given.resume[1])
        if changes:
            lines.append(f"changed since: {', '.join(changes)}; not what an unbroken run would give")
    elif train.init_from:
        lines.append(f"start from the weights of {train.init_from}")
    on_cpu = run.hardware.device == "cpu" or cuda_problem() is not None
    if train.dtype == "bfloat16" and on_cpu and not cpu_has_bfloat16():
        lines.append("note: this CPU has no bfloat16 instructions; train.dtype=float32 is many times faster here")
    if not given.shards.heldout:
        lines.append("the store has no held-out samples: no acceptance while training, and best/ is last/")
    return lines


def finished(run: TrainRun, given: Inputs, step: int, elapsed_s: float) -> bool:
    limit = run.train.max_minutes
    return step >= given.total_steps or (limit is not None and elapsed_s >= 60 * limit)


# ---------------------------------------------------------------- the loop


class Trainer:
    """A run on one rank: engine, data, results, step and clock. Built when everything was checked."""

    def __init__(self, run: TrainRun, given: Inputs, device: torch.device):
        self.run, self.given, self.device, self.config = run, given, device, given.config
        self.output_dir = inputs.output_dir(run)
        self.feed = inputs.open_feed(run, given.store, given.shards, given.order, given.stream,
                                     given.resume[1]["step"] if given.resume else 0)  # fmt: skip
        self.head = read_target_head(given.store, inputs.cache_dir(run)).to(device, inputs.DTYPES[run.train.dtype])
        kernels = resolve_kernels(run.train.kernels, device)
        self.objective = inputs.make_objective(run, self.config, kernels)
        self.attention = resolve_attention(run.train.attention, device, training=True)
        model = inputs.initial_drafter(run, self.config).use(kernels, run.train.activation_checkpointing)
        self.engine = zero.ZeroEngine(model, run.train, run.zero, given.accumulation, device)

        same_everywhere("train.resume", str(given.resume and given.resume[0].name), device)
        state = {"step": 0, "elapsed_s": 0.0, "best": {}, "run_id": uuid.uuid4().hex[:12]}
        if given.resume:
            folder, state = given.resume
            self.engine.load(folder / TRAINING, state["num_steps"])
        self.step = self.saved_step = state["step"]
        self.run_id, self.elapsed_before_s, self.start_s = state["run_id"], state["elapsed_s"], time.monotonic()
        self.results = Results(self.output_dir, self.config, self.record, state["best"])
        self.metrics = Metrics(self.output_dir, run.train.wandb, cli.config_dict(run),
                               self.step if given.resume else None, self.run_id)  # fmt: skip

    def elapsed_s(self) -> float:
        """Of the whole run, those before a resume included."""
        return self.elapsed_before_s + time.monotonic() - self.start_s

    def train(self) -> None:
        """Steps until the schedule, the clock or a signal ends them; then last/, best/ and the summary."""
        train, given = self.run.train, self.given
        micro_batches = (rows for step in range(self.step, given.total_steps) for rows in rank_share(
            self.feed.step_rows(step), dist.rank(), dist.world_size(), train.micro_batch))  # fmt: skip
        ahead = math.ceil(train.prefetch_rows / train.micro_batch)
        prefetcher = Prefetcher(RowReader(self.feed.cache, self.feed.markers, train.row_tokens), micro_batches, ahead,
                                pin=self.device.type == "cuda")  # fmt: skip
        batches, log, interrupted = iter(prefetcher), StepLog(self.metrics, given.total_steps), False
        complete = False
        try:
            if train.init_from and self.step == 0:
                self.evaluate()
            with stop_signals() as stopped:
                self.feed.stops_when(lambda: bool(stopped))
                while self.step < given.total_steps:
                    window = next_window(
                        batches, given.accumulation, self.config, self.objective, num_anchors=train.num_anchors,
                        seed=train.seed, device=self.device, elapsed_s=self.elapsed_s(), stop=bool(stopped),
                    )  # fmt: skip
                    interrupted = window.stop
                    if interrupted or finished(self.run, given, self.step, window.elapsed_s):
                        break
                    lr = self.learning_rate(window.elapsed_s)
                    self.engine.set_learning_rate(lr)
                    values = train_window(self.engine, window, self.config, self.head, self.objective, self.attention)
                    self.step += 1
                    self.feed.advance(self.step)
                    log.count(tokens=window.num_tokens, samples=window.num_samples, blocks=window.num_blocks)
                    if self.step % train.log_every == 0:
                        log.write(self.step, {**values, "lr": lr}, window.elapsed_s)
                    if self.step % train.eval_every == 0:
                        self.evaluate()
                    if self.step % train.save_every == 0:
                        self.save()
            if not interrupted and self.results.heldout.get("step") != self.step:
                self.evaluate()
            if self.saved_step != self.step:
                self.save()
            complete = not interrupted
        finally:
            self.feed.close(done=complete)
            prefetcher.close()
            self.metrics.close()
        if interrupted:
            say(f"stopped by a signal after step {self.step:,}: saved. The same command continues from there.")
            return
        self.results.finish(self.step, self.engine)
        rows = [["steps", f"{self.step:,}"], ["time", duration(self.elapsed_s())]]
        table(f"trained {self.config.name}", ["", ""], rows + log.summary() + self.results.summary())
        say("next: " + cli.next_command("eval", self.run, **{"eval.checkpoint": str(self.output_dir / "best")}))

    def learning_rate(self, elapsed_s: float) -> float:
        """Of the coming step."""
        train = self.run.train
        max_s = train.max_minutes * 60 if train.max_minutes else None
        progress = progress_at(self.step, self.given.total_steps, elapsed_s, max_s)
        return learning_rate(progress, train.lr, train.warmup_ratio, train.min_lr_ratio)

    def evaluate(self) -> None:
        """Held-out loss and acceptance; the best weights so far go to best/."""
        if not self.given.shards.heldout:
            return
        values = evaluate_heldout(
            self.engine, self.config, self.head, self.feed.cache, self.given.shards.heldout, objective=self.objective,
            num_samples=self.run.train.eval_samples, stop_ids=self.given.manifest["target"]["stop_ids"],
            attention=self.attention,
        )  # fmt: skip
        self.metrics.log(self.step, values)
        self.results.note(self.step, values, self.engine)

    def save(self) -> None:
        """A checkpoint, at the end of an accumulation window."""
        row = self.step * self.run.train.global_batch
        facts = inputs.training_facts(self.run, self.config, self.given.manifest, self.given.shards)
        state = {
            "step": self.step, "row": row, "epoch": self.given.order.row(row).epoch, "elapsed_s": self.elapsed_s(),
            "run_id": self.run_id, "world_size": dist.world_size(), "zero_stage": self.run.zero.stage, "facts": facts,
            "best": self.results.best, "lr": self.learning_rate(self.elapsed_s()),
            "provenance": self.record(self.step, self.results.heldout),
        }  # fmt: skip
        folder = save_checkpoint(
            self.output_dir, self.engine, state, lambda folder, w: self.results.write_drafter(folder, self.step, w),
            keep=self.run.train.keep_checkpoints,
            need_bytes=inputs.checkpoint_bytes(self.config, self.run.train.dtype),
        )  # fmt: skip
        self.saved_step = self.step
        say(f"saved {folder}")

    def record(self, step: int, heldout: dict) -> dict:
        """Provenance of the weights after `step`."""
        manifest = self.given.manifest
        return provenance(
            cli.config_dict(self.run), step=step, seed=self.run.train.seed, heldout=heldout,
            target={key: manifest["target"][key] for key in ("name", "fingerprint")}, layer_ids=manifest["layer_ids"],
            chat_template_hash=manifest["chat_template_hash"],
        )  # fmt: skip


if __name__ == "__main__":
    cli.main("train", main)
