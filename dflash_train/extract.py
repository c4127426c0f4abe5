"""extract: capture the target's hidden states for every answered sample and store them as shards.

    python -m dflash_train.extract +data=demo target=smollm2_135m store=s3

Runs mix and regenerate first where their output is missing. What is done has a marker in the store; the rest is done,
so a killed run is resumed by typing the same command. `verify=true` only reads the store back and checks it (with
`reopen=true` bad shards are done again by the next run); `clean=true` deletes what this run has left in the store.
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path

from dflash_train import cli, plan, regenerate
from dflash_train.capture.desk import Desk, run_here
from dflash_train.capture.rows import RenderedRows, rendered_rows
from dflash_train.capture.setup import MUST_AGREE, Setup, make_manifest, plan_all, resolve, say_rounding
from dflash_train.capture.stream import StreamDesk, plan_stream
from dflash_train.capture.supervisor import Supervisor, visible_gpus
from dflash_train.capture.worker import Order
from dflash_train.config import ExtractRun
from dflash_train.monitor.state import RunState
from dflash_train.monitor.watch import watch
from dflash_train.planning.machine import gpus_at_hand
from dflash_train.planning.shapes import sizes_from_files, target_sizes
from dflash_train.planning.speed import layer_flops
from dflash_train.store import STORES, budget
from dflash_train.store.base import ObjectStore
from dflash_train.store.catalog import tally
from dflash_train.store.claims import Claims, sweep_claims
from dflash_train.store.clean import clean_store
from dflash_train.store.resume import is_complete, missing_shards
from dflash_train.store.shard import put_manifest, read_manifest
from dflash_train.store.slices import ShardPlan
from dflash_train.store.staging import staging_folder, staging_parent
from dflash_train.store.stream import RING, StreamStore
from dflash_train.store.stream_writer import Ring
from dflash_train.store.target_files import has_target_files
from dflash_train.store.upload import Uploader, stop_on_signals
from dflash_train.store.verify import verify_store
from dflash_train.target import TARGETS
from dflash_train.util.dist import world_size
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import say

ASSUMED_TOKENS, ASSUMED_PROMPT = 1000, 200
"""Tokens a sample, and of them the prompt's, in the estimate made before answers exist; the exact figure follows."""


def main(run: ExtractRun) -> int | None:
    """The whole stage."""
    store = cli.plugin(STORES, run.store.kind, "store.kind").open_store(run.store, run.store_name)
    streams = isinstance(store, StreamStore)
    if run.extract.verify:
        return verify(run, store)
    with store.held("extraction") if streams and not run.dry_run else nullcontext():
        if run.extract.clean:
            with store.held("training") if streams else nullcontext():
                return clean_store(store, run.extract.yes)
        return extract(run, store)


def extract(run: ExtractRun, store: ObjectStore) -> int | None:
    """From answers to shards."""
    preflight(run, store)
    target_module = cli.plugin(TARGETS, run.target.kind, "target.kind")
    setup = resolve(run, target_module.prepare(run.target))
    regenerate.ensure_answers(run)
    if is_complete(store, setup.inputs_hash()):
        say(f"every shard is in {store.url} already")
        return finish(run, store)

    rows = rendered_rows(run, setup.files, setup.answers)
    shards = plan_all(setup, rows)
    if isinstance(store, StreamStore):
        return extract_stream(setup, store, rows, shards)
    check_budget(setup, store, shards)
    say_rounding(put_manifest(store, make_manifest(setup, rows, shards), MUST_AGREE), run)
    todo = missing_shards(store, shards)
    say(f"{len(shards) - len(todo)} of {len(shards)} shards are there; {len(todo)} to do, into {store.url}")
    if todo or not has_target_files(store):
        largest = max((shard.num_tokens for shard in todo), default=0) * setup.token_bytes
        with staging_folder(staging_parent(run.store, largest)) as folder, stop_on_signals() as stop_check:
            state = make_state(setup, len(shards), rows, todo)
            page = run.extract.monitor
            with watch(state, page.enabled, page.host, page.port):
                extract_shards(setup, store, rows, todo, folder, state, stop_check)
    return finish(run, store)


# ---------------------------------------------------------------- before anything is loaded


def preflight(run: ExtractRun, store: ObjectStore) -> None:
    """Say what will be done and check what it needs; ends the program when something is missing, or after a dry run."""
    if world_size() > 1:
        raise UserError("WORLD_SIZE", got=world_size(), want="1: extract starts a worker for every GPU by itself",
                        fix="python -m dflash_train.extract, without a launcher; once on each host where there are "
                        "several, with the same store")  # fmt: skip
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
        *plan.check_gpu_memory(run, weight_bytes, "extract.gpus_per_worker=2, a smaller target, or hardware=cpu",
                               None if run.extract.num_workers == 0 else run.extract.gpus_per_worker),
        plan.check_store(store),
        check_storage(run, store, answered),
    ]  # fmt: skip
    if weights.download_bytes:
        checks.append(plan.check_disk(Path.home(), weights.download_bytes + weights.num_bytes))
    plan.preflight(run, checks, todo)


def check_storage(run: ExtractRun, store: ObjectStore, answered: bool) -> plan.Check:
    """An estimate while there are no answers to count: a recipe of a million rows is refused before they are made."""
    if isinstance(store, StreamStore):
        return store.check_room()
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


# ---------------------------------------------------------------- the plan


def check_budget(setup: Setup, store: ObjectStore, shards: list[ShardPlan]) -> None:
    """Say what the store will take; refuse what is more than store.max_bytes."""
    tokens = sum(shard.num_tokens for shard in shards)
    samples = sum(len(shard.sample_ids) for shard in shards)
    say(budget.storage_line(setup.hidden_size, len(setup.layer_ids), setup.run.store, samples, tokens))
    present = sum(size for _, size in store.list("shards/"))
    budget.refuse_too_much(tokens * setup.token_bytes, budget.max_bytes(setup.run.store, store, present))


def make_state(setup: Setup, num_shards: int, rows: RenderedRows, todo: list[ShardPlan]) -> RunState:
    """What the monitor shows, before the first shard. Utilisation counts the layers up to the last captured one."""
    run = setup.run
    sizes, _ = target_sizes(sizes_from_files(run.target, setup.files.hf_config.get_text_config().to_dict()))
    layers = None if run.store.last_hidden else max(setup.layer_ids) + 1
    peak = plan.pick_machine(run.hardware).bf16_flops
    state = RunState(
        "extract", f"{run.target.name} for {run.data.name}", sum(len(shard.sample_ids) for shard in todo),
        sum(shard.num_tokens for shard in todo), num_shards, num_shards - len(todo),
        flops_per_token=layer_flops(sizes, layers) if sizes else None,
        peak_flops=run.extract.gpus_per_worker * peak if peak and run.target.dtype == "bfloat16" else None,
    )  # fmt: skip
    for reason, count in rows.dropped.items():
        state.dropped(reason, count)
    return state


# ---------------------------------------------------------------- the work


def extract_shards(setup: Setup, store: ObjectStore, rows: RenderedRows, todo: list[ShardPlan], folder: Path,
                   state: RunState, stop_check) -> None:  # fmt: skip
    """Capture, stage and upload every shard of `todo`, beside other hosts that do the same; all of them are uploaded
    when this returns."""
    order, config = Order.of(setup, rows, folder, todo), setup.run.extract
    with Claims(store, config.lease_s, stop_check) as claims:
        desk = Desk(rows, todo, setup.token_bytes, claims, state, stop_check)
        with Uploader(store, folder, threads=setup.run.store.upload_threads, exit_s=config.stop_s,
                      on_done=desk.uploaded, on_retry=state.retry, stop_check=stop_check) as uploader:  # fmt: skip
            desk.open(uploader)
            work(setup, store, order, desk, len(todo))
            desk.close()


def extract_stream(setup: Setup, store: StreamStore, rows: RenderedRows, shards: list[ShardPlan]) -> None:
    """Make what training uses next, in its order, as long as it runs; what it has used up goes."""
    train, heldout = plan_stream(setup, store, shards)
    store.make_folder()
    say_rounding(put_manifest(store, make_manifest(setup, rows, [*train, *heldout]), MUST_AGREE), setup.run)
    store.write_plan(train)
    todo = missing_shards(store, heldout)
    say(f"stream: {len(train)} train shards an epoch through a ring of {human_bytes(store.max_bytes)} in {store.url}; "
        f"{len(todo)} of {len(heldout)} held-out shards to do first, which stay")  # fmt: skip
    say("now, on other GPUs: " + cli.next_command("train", setup.run))
    with staging_folder(store.folder / RING) as folder, stop_on_signals() as stop_check:
        order = Order.of(setup, rows, folder, [*train, *heldout])
        state = make_state(setup, len(train) + len(heldout), rows, [*train, *todo])
        page = setup.run.extract.monitor
        with watch(state, page.enabled, page.host, page.port), Ring(store, train, todo, stop_check) as ring:
            desk = StreamDesk(rows, ring, setup.token_bytes, state, stop_check)
            work(setup, store, order, desk, len(train))
            desk.close()
    say("training is done; the ring is empty. What the stream still keeps goes with clean=true")


def work(setup: Setup, store: ObjectStore, order: Order, desk: Desk, num_shards: int) -> None:
    """Capture what the desk hands out: on worker processes, or, where there is no GPU, in this one."""
    gpus, num_workers = choose_workers(setup.run, num_shards)
    target_files = lambda: None if has_target_files(store) else setup.target_files()
    if num_workers:
        with Supervisor(order, desk, setup.run.extract, gpus, num_workers, target_files) as supervisor:
            supervisor.run()
    else:
        run_here(order, desk, target_files())


def choose_workers(run: ExtractRun, num_shards: int) -> tuple[list[str], int]:
    """(what CUDA_VISIBLE_DEVICES calls each worker's GPU or GPUs, number of worker processes), by extract.num_workers
    and extract.gpus_per_worker."""
    names = visible_gpus(len(gpus_at_hand())) if run.hardware.device != "cpu" else []
    wish, ways = run.extract.num_workers, run.extract.gpus_per_worker
    gpus = [",".join(names[i : i + ways]) for i in range(0, len(names) - ways + 1, ways)]
    if names and not gpus:
        raise UserError("extract.gpus_per_worker", got=ways, want=f"at most {len(names)}, the visible GPUs")
    if gpus and wish == 0 and ways > 1:
        raise UserError("extract.num_workers", got="0, with extract.gpus_per_worker > 1", want="null, or workers",
                        fix="extract.num_workers=null")  # fmt: skip
    if gpus and wish and wish > len(gpus):
        raise UserError("extract.num_workers", got=wish, want=f"at most {len(gpus)}, with {len(names)} visible GPUs")
    return gpus, min(len(gpus) if wish is None else wish, max(1, num_shards))


# ---------------------------------------------------------------- the end


def finish(run: ExtractRun, store: ObjectStore) -> int | None:
    """Count what is in the store; non-zero when a shard is missing."""
    manifest = read_manifest(store)
    total, want = tally(store, update_catalog=True), sum(manifest["shards"].values())
    say(f"{total.num_shards:,} of {want:,} shards in {store.url}: {total.num_samples:,} samples, "
        f"{total.num_tokens:,} tokens ({total.num_supervised:,} supervised), {human_bytes(total.bytes)}")  # fmt: skip
    if total.num_shards != want:
        say("some shards are missing: type the same command again")
        return 1
    sweep_claims(store)
    say("next: " + cli.next_command("train", run))
    return None


def verify(run: ExtractRun, store: ObjectStore) -> int:
    """Read everything back; 1 when something is bad."""
    if isinstance(store, StreamStore):
        raise UserError("extract.verify", got="true, with store=stream", want="a store that keeps its shards")
    say(f"verify: reading back every shard in {store.url}")
    with tempfile.TemporaryDirectory() as folder:
        report = verify_store(store, folder, reopen=run.extract.reopen)
    for line in report.lines():
        say(line)
    return 1 if report.problems else 0


if __name__ == "__main__":
    cli.main("extract", main)
