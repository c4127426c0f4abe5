"""The data card: every number is the mix's own, no text in it is ever markup, and the page needs nothing else."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers_data import make_run, write_rows
from markdown_it import MarkdownIt

from dflash_train import mix
from dflash_train.data.card import parts, write_card
from dflash_train.data.card import rows as card_rows
from dflash_train.data.card.facts import build_card
from dflash_train.data.card.html import page
from dflash_train.data.card.markdown import fenced, inline, markdown, visible
from dflash_train.data.card.parts import Card, Example, Section, Table
from dflash_train.data.card.rows import RowCounts, language
from dflash_train.records import Sample
from dflash_train.util.io import read_json, read_jsonl, write_jsonl

ITEM = "Janet's ducks lay sixteen eggs per day, and she eats three of them for breakfast every single morning."
HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></td></table><img src=x onerror=alert(1)>",
    "a | b || c",
    "line\nbreak | and\r\nmore",
    "[click](http://evil.example) ![x](http://evil.example/x.png) <http://evil.example> http://e.com www.e.com",
    "``` \n# heading\n```` `code` **bold** _under_ ~~gone~~ $x^2$ @someone",
    "{{ 7 * 7 }} {% raw %} {{ card }}",
    "# - + = > 1. \\| & &lt; &#60; \" ' --> <!-- ]]> <![CDATA[",
    "turned \u202egnp.exe\u202c zero\u200bwidth \x00nul \x1b[31mred \ud83d half",
    "../../etc/passwd",
)


def make_mix(tmp_path: Path) -> tuple[Path, dict]:
    """A mix whose counts are known: see the numbers in the tests."""
    apples = [{"id": f"a{i}", "prompt": f"How many apples are in basket number {i}, please?"} for i in range(40)]
    dirt = [{"id": "empty", "prompt": ""}, {"id": "again", "prompt": apples[3]["prompt"].upper()}]
    code = [{"id": f"c{i}", "prompt": f"Write a function that adds {i} to a number.", "license": "BSD-3-Clause"}
            for i in range(20)]  # fmt: skip
    copies = [{"id": f"copy{i}", "prompt": apples[i]["prompt"]} for i in range(3)]
    long = " ".join(f"Take the box with number {i} and put it on the table." for i in range(9))
    near = [{"id": f"near{i}", "prompt": f"{long} Then sort them {last}."} for i, last in enumerate(("up", "down"))]
    leaked = [{"id": f"leak{i}", "prompt": f"Question {i}: {ITEM} How many are left?"} for i in range(2)]
    write_rows(tmp_path / "apples.jsonl", apples + dirt)
    write_rows(tmp_path / "code.jsonl", code + copies + near + leaked)
    write_rows(tmp_path / "test.jsonl", [{"turns": [ITEM]}])
    run = make_run(
        tmp_path,
        "data=mine",
        f"data.sources.mine.path={tmp_path / 'apples.jsonl'}",
        "data.sources.mine.license=MIT",
        f"+data.sources.code.path={tmp_path / 'code.jsonl'}",
        "+data.sources.code.license=Apache-2.0",
        "+data.sources.code.bucket=code",
        "+data.sources.code.prompts_by=GPT-4",
        "data.near_duplicates.buckets=[code]",
        "data.heldout_fraction=0.1",
        "data.thinking_share.chat=1.0",
        f"data.decontaminate=['file:{tmp_path / 'test.jsonl'}']",
    )
    folder = mix.ensure_mix(run)
    return folder, read_json(folder / "manifest.json")


def answer(folder: Path, answers: Path) -> dict:
    """Answers to the mix as regenerate writes them: every fifth is lost, every third of the others is cut."""
    kept = []
    for i, row in enumerate(read_jsonl(folder / "prompts.jsonl")):
        if i % 5 == 0:
            continue
        regen = {"model": "tiny", "n_prompt": 10 + i, "n_tokens": 2 * i, "token_ids": [],
                 "finish_reason": "length" if i % 3 == 0 else "stop"}  # fmt: skip
        turn = {"role": "assistant", "content": f"answer {i}", "reasoning_content": "hm"}
        kept.append({**row, "messages": [*row["messages"], turn], "regen": regen})
    answers.mkdir()
    write_jsonl(answers / "samples.jsonl", kept)
    return {
        "identity": {"target": "tiny", "template_hash": "abc", "sampling": {"on": {"temperature": 1.0}}},
        "provenance": {"code_version": "0.1"},
        "answer_tokens": sum(row["regen"]["n_tokens"] for row in kept),
        "dropped": {"empty": 4, "repetition": 3},
        "dropped_by_source": {"mine": {"empty": 4, "repetition": 1}, "code": {"repetition": 2}},
        "refill": {"mine": {"lost": 5, "refilled": 3, "not_refilled": 2}},
        "servers": {"f00": {"url": "http://127.0.0.1:8000/v1", "version": "0.9"}},
    }


def counted(folder: Path, manifest: dict, names: list[str] | None = None) -> RowCounts:
    counts = RowCounts(len(manifest["sources"]))
    for name in names or ["prompts.jsonl", "heldout.jsonl"]:
        counts.add(read_jsonl(folder / name))
    return counts


def tables(card: Card) -> dict[str, list[list]]:
    """{table title or section title: rows}."""
    return {p.title or s.title: p.rows for s in card.sections for p in s.parts if isinstance(p, Table)}


def hostile_card() -> Card:
    """Hostile text in every place that data can reach."""
    rows = [[text, 1, text, None] for text in HOSTILE]
    everything = [
        Table(HOSTILE[0], list(HOSTILE[:4]), rows),
        parts.Bars(HOSTILE[2], [(text, i) for i, text in enumerate(HOSTILE)]),
        *parts.histograms({text: parts.Counter([1, 5, 900]) for text in HOSTILE}, "tokens"),
        *[Example(text, [(other, text) for other in HOSTILE]) for text in HOSTILE],
    ]
    return Card(HOSTILE[0], HOSTILE[5], [(text, text) for text in HOSTILE], [
        Section(HOSTILE[1], list(HOSTILE), everything), *[Section(text, [text]) for text in HOSTILE]])  # fmt: skip


# ---------------------------------------------------------------- facts


def test_the_facts_of_a_small_mix_are_exact(tmp_path):
    folder, manifest = make_mix(tmp_path)
    train, heldout = (list(read_jsonl(folder / name)) for name in ("prompts.jsonl", "heldout.jsonl"))
    found = tables(build_card(manifest, None, counted(folder, manifest)))
    funnel = {row[0]: row[1:] for row in found["From source to mix"]}
    of = lambda rows, name: sum(row["source"] == name for row in rows)
    # asked for, read, dropped, kept, taken, held out
    assert funnel["mine"] == ["all", 42, 2, 40, of(train, "mine"), of(heldout, "mine")]
    assert funnel["code"] == ["all", 27, 6, 21, of(train, "code"), of(heldout, "code")]
    assert funnel["all sources"] == [None, 69, 8, 61, len(train), len(heldout)]
    assert found["Rows dropped"] == [
        ["contaminated", 2, 2, None], ["duplicate", 4, 3, 1], ["empty_user", 1, None, 1],
        ["near_duplicate", 1, 1, None],
    ]  # fmt: skip
    same, nearly = (rows for title, rows in found.items() if title.startswith(("The same", "Nearly")))
    assert same == [["code", 3, 3], ["mine", 1, 1]] and nearly == [["code", 1, 1]]
    assert found["Rows that held one"] == [[f"file:{tmp_path / 'test.jsonl'}", 2, 2]]
    assert found["Items of the evaluation sets"] == [[f"file:{tmp_path / 'test.jsonl'}", 1, 0]]
    assert found["Who wrote the prompts"] == [["code", "GPT-4"]]
    by_licence = {row[0]: row[1] for row in found["By licence"]}
    ours = sum(row["license"] == "BSD-3-Clause" for row in train)
    assert by_licence.pop("BSD-3-Clause") == ours > 10, "the row's licence counts"
    assert {"MIT": of(train, "mine"), "Apache-2.0": of(train, "code") - ours} == {"Apache-2.0": 0} | by_licence
    assert {row[0]: row[1] for row in found["By bucket"]} == {"chat": of(train, "mine"), "code": of(train, "code")}
    assert found["Thinking, training rows"][0] == ["chat", of(train, "mine"), 0, "100.0 %"]
    lengths = sorted(len(row["messages"][0]["content"]) for row in train + heldout if row["source"] == "mine")
    by_source = {row[0]: row[1:] for row in found["Characters of a prompt, by source"]}
    assert by_source["mine"] == [40, lengths[19], lengths[37], lengths[-1]]
    assert found["Languages"] == [["en", len(train), "100.0 %"]]
    made = dict(found["The mix"])
    assert made["recipe hash"] == manifest["recipe_hash"] and made["seed"] == "0" and made["code"]
    assert made["sha256 of prompts.jsonl"] == manifest["files"]["prompts.jsonl"]["sha256"]


def test_the_facts_of_answers_are_exact_and_follow_those_of_the_mix(tmp_path):
    folder, manifest = make_mix(tmp_path)
    answers = answer(folder, tmp_path / "answers")
    rows = list(read_jsonl(tmp_path / "answers" / "samples.jsonl"))
    card = build_card(manifest, answers, counted(tmp_path / "answers", manifest, ["samples.jsonl"]))
    found = tables(card)
    assert [row[-1] for row in found["From source to mix"]][-1] == len(rows) > 30
    ended = {row[0]: row[1:] for row in found["How the kept answers ended"]}
    for mode in ("on", "off"):
        of_mode = [row["regen"] for row in rows if row["thinking"] == mode]
        cut = sum(regen["finish_reason"] == "length" for regen in of_mode)
        share = f"{100 * cut / len(of_mode):.1f} %"
        assert ended[f"thinking {mode}"] == [len(of_mode), cut, len(of_mode) - cut, share] and cut
        histogram = {p.title: p for s in card.sections for p in s.parts if isinstance(p, parts.Histogram)}
        for title, key in ((f"Answers, thinking {mode}", "n_tokens"), (f"Prompts, thinking {mode}", "n_prompt")):
            edges, counts = histogram[title].edges, histogram[title].counts
            values = [regen[key] for regen in of_mode]
            assert counts == [sum(a <= v < b for v in values) for a, b in zip(edges, edges[1:])]  # noqa: RUF007
            assert sum(counts) == len(of_mode)
    lost = found["Rows that got no answer, or one that is not kept"]
    assert lost == [["empty", 4, None, 4], ["repetition", 3, 2, 1]]
    assert found["Training rows lost, and reserve rows in their place"] == [["mine", 5, 3, 2]]
    assert ["server f00.version", "0.9"] in found["The answers"]
    assert ["template_hash", "abc"] in found["The answers"]
    assert ["sampling.on.temperature", "1.0"] in found["The answers"]
    shown = [message for s in card.sections for p in s.parts if isinstance(p, Example) for message in p.messages]
    assert any(role == "assistant" and text.startswith("hm\n\nanswer") for role, text in shown)


def test_a_second_run_writes_the_same_bytes_whatever_order_the_manifest_has(tmp_path):
    folder, manifest = make_mix(tmp_path)
    names = ("card.md", "card.html")
    cards = []
    for order in (manifest, dict(reversed(manifest.items()))):
        order["sources"] = dict(reversed(order["sources"].items()))
        write_card(folder, ["prompts.jsonl", "heldout.jsonl"], order)
        cards.append([(folder / name).read_bytes() for name in names])
    assert cards[0] == cards[1]
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("card")) == sorted(names)
    (folder / "heldout.jsonl").write_text("")
    write_card(folder, ["prompts.jsonl", "heldout.jsonl"], manifest)
    assert [(folder / name).read_bytes() for name in names] != cards[0], "the card is read from the rows"


def test_a_mix_without_rows_or_with_one_has_a_card(tmp_path):
    folder, manifest = make_mix(tmp_path)
    one = list(read_jsonl(folder / "prompts.jsonl"))[:1]
    for rows in ([], one):
        write_jsonl(folder / "few.jsonl", rows)
        write_card(folder, ["few.jsonl"], manifest)
        ElementTree.fromstring((folder / "card.html").read_text("utf-8").partition("\n")[2])


def test_lengths_fall_into_half_octaves_that_hold_them_all():
    for low, high in ((0, 0), (0, 1), (1, 1), (3, 3), (8, 2047), (5, 100_000), (11, 12)):
        edges = parts.log_edges(low, high)
        assert edges[0] <= low and edges[-1] > high and edges == sorted(set(edges))
        assert edges[1] > low and edges[-2] <= high, "no empty bin at either end"
    lengths = parts.Counter({1: 50, 10: 45, 100: 5})
    assert [parts.quantile(lengths, q) for q in (0.5, 0.51, 0.95, 0.96, 1)] == [1, 10, 10, 100, 100]


def test_languages_are_told_on_the_head_of_the_rows_and_doubt_is_said(tmp_path, monkeypatch):
    said = lambda text: language([{"role": "system", "content": "You help."}, {"role": "user", "content": text}])
    assert said("Why is the sky blue in the daytime and red in the evening?") == "en"
    assert said("Warum ist der Himmel am Tag blau und am Abend rot?") == "de"
    assert said("Почему небо днём голубое, а вечером красное?") == "ru"
    assert said("3 4 7 = 5") == said("") == "unsure"
    monkeypatch.setattr(card_rows, "LANGUAGE_ROWS", 3)
    folder, manifest = make_mix(tmp_path)
    counts = counted(folder, manifest)
    assert counts.languages.total() == 3 and counts.rows.total() == 61
    note = next(s for s in build_card(manifest, None, counts).sections if s.title == "Languages").notes[0]
    assert "the first 3 training rows of the shuffled mix" in note


def test_examples_are_few_short_and_of_every_source():
    counts = RowCounts(2)
    turn = lambda i: {"role": "user" if i % 2 else "assistant", "content": f"{i} " + "x" * 2000}
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    counts.add(Sample(f"{s}{i}", s, "MIT", "chat", "train", "off", [turn(j) for j in range(20)], tools).to_json()
               for i in range(50) for s in "ab")  # fmt: skip
    assert {source: len(found) for source, found in counts.examples.items()} == {"a": 6, "b": 6}
    _, shown = counts.examples["a"][0]
    assert len(shown.messages) == 2 + card_rows.EXAMPLE_MESSAGES and shown.messages[0] == ("tools", "get_weather")
    assert ("...", "14 messages are left out") in shown.messages and shown.messages[-1][1].startswith("19 x")
    assert all(len(text) < card_rows.EXAMPLE_CHARS + 40 for _, text in shown.messages)
    assert shown.messages[-1][1].endswith("... (1,403 more characters)")


# ---------------------------------------------------------------- harmless


def test_the_page_is_well_formed_needs_nothing_else_and_shows_hostile_text_as_text():
    text = page(hostile_card())
    doctype, _, rest = text.partition("\n")
    assert doctype == "<!DOCTYPE html>"
    root = ElementTree.fromstring(rest)  # raises on anything that is not closed or not escaped
    tags = {element.tag for element in root.iter()}
    assert tags.isdisjoint({"script", "img", "link", "iframe", "object", "a", "form", "base"}) and "pre" in tags
    for element in root.iter():
        assert not {name for name in element.attrib if name.startswith("on") or name in ("src", "href", "style")}
    style = root.find("head/style").text
    assert "url(" not in style and "@import" not in style
    policy = [m.attrib["content"] for m in root.iter("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    shown = ["".join(element.itertext()) for element in root.iter("pre")]
    for hostile in HOSTILE:
        assert shown.count(visible(hostile)) == len(HOSTILE)
    text.encode("utf-8")


def test_no_markdown_cell_ends_its_table_and_no_text_becomes_markup():
    text = markdown(hostile_card())
    text.encode("utf-8")
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inner = [child for token in tokens for child in token.children or ()]
    types = {token.type for token in tokens} | {child.type for child in inner}
    assert types.isdisjoint({"html_block", "html_inline", "link_open", "image", "em_open", "s_open", "code_inline"})
    assert types.isdisjoint({"ordered_list_open", "blockquote_open", "hr", "code_block", "hardbreak"})
    count = lambda kind: sum(token.type == kind for token in tokens)
    assert count("table_open") == 1 and count("bullet_list_open") == 1 and count("list_item_open") == len(HOSTILE)
    assert count("tr_open") == 1 + len(HOSTILE) and count("td_open") == 4 * len(HOSTILE)
    assert count("heading_open") == 2 + len(HOSTILE)
    assert {token.tag for token in tokens if token.type == "heading_open"} == {"h1", "h2"}
    blocks = [token.content for token in tokens if token.type == "fence"]
    for hostile in HOSTILE:
        assert blocks.count(visible(hostile) + "\n") == len(HOSTILE)
    cells = [token.content for token in tokens if token.type == "inline"]
    flat = lambda cell: " ".join(visible(cell).split())
    plain = ["".join(child.content for child in token.children) for token in tokens if token.type == "inline"]
    assert len(cells) == len(plain) and all(plain.count(flat(hostile)) >= 4 for hostile in HOSTILE)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_escaping_is_needed_and_shows_the_text_itself(hostile):
    parse = lambda text: MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    shown = [child.content for token in parse(inline(hostile)) for child in token.children or ()]
    assert "".join(shown) == " ".join(visible(hostile).split())
    (block,) = parse(fenced(hostile))
    assert block.type == "fence" and block.content == visible(hostile) + "\n"


def test_addresses_accounts_and_formulas_are_no_links_where_those_are_on():
    assert not re.search(r"https?://|www\.\w|(?<!\\)[@$]", inline("http://a.example www.a.com me@a.com $x$ HTTPS://A"))


def test_a_hostile_mix_writes_two_files_with_fixed_names(tmp_path):
    folder, manifest = make_mix(tmp_path)
    rows = [Sample(h, h, h, h, "train", "off", [{"role": "user", "content": h}]).to_json() for h in HOSTILE]
    (folder / "hostile.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = manifest["sources"].pop("code")
    config = manifest["config"]["data"]["sources"]
    for hostile in HOSTILE:
        manifest["sources"][hostile] = {
            **source,
            "license": hostile,
            "dropped": {hostile: 1},
            "kind": hostile,
            "revision": hostile,
        }
        config[hostile] = {**config["code"], "path": hostile, "prompts_by": hostile}
        manifest["dropped"][hostile] = 1
    manifest["recipe"] = HOSTILE[0]
    before = set(tmp_path.rglob("*"))
    write_card(folder, ["hostile.jsonl"], manifest)
    assert set(tmp_path.rglob("*")) == before | {folder / "card.md", folder / "card.html"}
    text = (folder / "card.html").read_text("utf-8")
    assert "<script" not in text and "49" not in text.partition("Rows to look at")[2]
    ElementTree.fromstring(text.partition("\n")[2])
    tokens = MarkdownIt("commonmark").enable("table").parse((folder / "card.md").read_text("utf-8"))
    assert {token.type for token in tokens}.isdisjoint({"html_block"}) and len(tokens) > 500
