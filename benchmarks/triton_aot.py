"""Shared memory of every Triton kernel of the capture path on cards that are not here, as a Markdown table.

    make triton && python benchmarks/triton_aot.py [--out runs/triton_aot]     no GPU; about four minutes of one core

All configurations of all tuners are compiled for every card, at Qwen3.6-27B's widths (tests/helpers_triton.py).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers_triton import CARDS  # noqa: E402


def compile_all(folder: Path) -> dict[int, dict]:
    """One process a card, one after the other. A result that is there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for capability in CARDS:
        out = folder / f"sm{capability}.json"
        if not out.exists():
            script = ROOT / "tests" / "helpers_triton.py"
            subprocess.run([sys.executable, script, str(capability), "all", out], check=True)
        results[capability] = json.loads(out.read_text())
    return results


def span(sizes: list[int]) -> str:
    """Least and most bytes, and how many configurations."""
    ends = sorted({min(sizes), max(sizes)})
    return " .. ".join(f"{size:,}" for size in ends) + f" ({len(sizes)})"


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def table(results: dict[int, dict]) -> str:
    """A row a kernel, a column a card."""
    every = [result["rows"] for result in results.values()]
    lines = [line("kernel", "paths", *(f"SM{capability}" for capability in results)), "|---" * (2 + len(every)) + "|"]
    for kernel in dict.fromkeys(row["kernel"] for rows in every for row in rows):
        found = [[row for row in rows if row["kernel"] == kernel] for rows in every]
        paths = sorted({path for rows in found for row in rows for path in row["paths"]})
        lines.append(line(f"`{kernel}`", ", ".join(paths), *(span([row["shared"] for row in rows]) for rows in found)))
    used = [sorted({f"`{name}`" for row in rows for name in row["instructions"]}) for rows in every]
    lines.append(line("a block may have", "", *(f"{CARDS[capability][1]:,}" for capability in results)))
    lines.append(line("instructions of note", "", *map(", ".join, used)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "triton_aot")
    results = compile_all(parser.parse_args().out)
    print(f"Triton {results[86]['triton']}\n\n{table(results)}")


if __name__ == "__main__":
    main()
