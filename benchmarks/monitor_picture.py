"""benchmarks/monitor.png: the page of a real extraction (SmolLM2-135M, two workers, an S3 server), by a real browser.

python benchmarks/monitor_picture.py [--work runs/monitor]     needs Chromium; a few minutes on two CPU cores
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "launch")]

from demo import settings  # noqa: E402
from helpers_browser import Browser  # noqa: E402
from local_s3 import S3Server  # noqa: E402

WIDTH, HEIGHT, SHARE = 1280, 900, 0.6
SMALL = ["data.answers.max_new_tokens=24"]
MANY_SHARDS = ["store.shard_bytes=1500000", "extract.num_workers=2", "extract.monitor.port=0"]


def stage(name: str, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", f"dflash_train.{name}", *overrides]


def watched_url(process: subprocess.Popen) -> str:
    """Where the run's page is, from the line that says so."""
    for line in process.stdout:
        print(line, end="")
        if line.startswith("watch this run: "):
            return line.split()[-1]
    raise RuntimeError(f"extract ended with {process.wait()} before its page was there")


def photograph(url: str, picture: Path) -> None:
    """Look at the page from the start, and keep it once the share of shards is reached."""
    with Browser() as browser:
        browser.open(url, WIDTH, HEIGHT)
        browser.wait_for("document.getElementById('workers').children.length > 0")
        while True:
            with urllib.request.urlopen(url + "api/state", timeout=20) as answer:
                shards = json.load(answer)["shards"]
            if shards["done"] >= SHARE * shards["total"]:
                break
            browser.evaluate("new Promise((done) => setTimeout(done, 500))")
        browser.evaluate("new Promise((done) => setTimeout(done, 2000))")
        browser.screenshot(picture)
        assert browser.errors == [], browser.errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/monitor"))
    parser.add_argument("--picture", type=Path, default=ROOT / "benchmarks" / "monitor.png")
    arguments = parser.parse_args()
    work, picture = arguments.work.absolute(), arguments.picture.absolute()
    overrides = settings(False, work, work / "checkpoints")
    with S3Server(work / "s3") as server:
        environment = {**os.environ, **server.environment, "DFLASH_STORE": f"s3://{server.bucket}/store"}
        environment["PYTHONPATH"] = str(ROOT)
        for name in ("mix", "regenerate"):
            subprocess.run(stage(name, [*overrides[name], *SMALL]), env=environment, check=True)
        command = stage("extract", [*overrides["extract"], *SMALL, *MANY_SHARDS])
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            photograph(watched_url(process), picture)
            print(process.stdout.read())
        assert process.returncode == 0, process.returncode
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
