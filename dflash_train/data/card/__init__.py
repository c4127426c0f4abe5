"""The data card: what a mix holds and how it came about, as card.md and as one self-contained card.html.

    manifests --+
                +-> sections of tables, plots and examples (facts.py) -> Markdown, HTML
    rows -------+   (rows.py: one pass, bounded memory)

`mix` writes it over the prompts, `regenerate` again over the answers. It is a pure function of the manifests and rows.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from dflash_train.data.card.facts import build_card
from dflash_train.data.card.html import page
from dflash_train.data.card.markdown import markdown
from dflash_train.data.card.rows import RowCounts
from dflash_train.util.io import read_jsonl, write_bytes
from dflash_train.util.log import say
from dflash_train.util.provenance import canonical_json


def write_card(folder: Path, files: Iterable[str], mix: dict, answers: dict | None = None) -> None:
    """Write card.md and card.html into `folder`.

    files: names of its row files (JSONL of canonical rows), training rows first; mix, answers: the manifests.
    """
    counts = RowCounts(len(mix["sources"]))
    for name in files:
        counts.add(read_jsonl(folder / name))
    # Keys in the order that the manifest's file has, so that both stages say the same of one mix.
    mix, answers = json.loads(canonical_json([mix, answers]))
    card = build_card(mix, answers, counts)
    write_bytes(folder / "card.md", markdown(card).encode("utf-8"))
    write_bytes(folder / "card.html", page(card).encode("utf-8"))
    say(f"data card: {folder}/card.html (and card.md)")
