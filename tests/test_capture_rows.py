"""Rendered rows: mapped files that are the same whatever made them, made once, and refused when they are damaged."""

import json
import os
import threading
import time

import numpy as np
import pytest
from helpers_store import make_run, write_answers

from dflash_train.capture import rows as rows_module
from dflash_train.capture.rows import UNUSED_S, RenderedRows, rendered_rows
from dflash_train.capture.setup import resolve
from dflash_train.data.chat import Renderer
from dflash_train.records import Sample
from dflash_train.target import tiny
from dflash_train.util import ahead, provenance
from dflash_train.util.errors import UserError
from dflash_train.util.io import atomic_folder, read_jsonl, remove_unused


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "code_version", lambda: "test")
    return make_run(tmp_path, data__num_processes=1)


def render(run) -> RenderedRows:
    setup = resolve(run, tiny.prepare(run.target))
    return rendered_rows(run, setup.files, setup.answers)


def files_of(rows: RenderedRows) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in rows.folder.iterdir()}


def test_every_row_is_what_the_renderer_says_in_the_order_of_the_answers(run):
    """Naive twin: render each sample by itself."""
    rows, renderer = render(run), Renderer(tiny.tiny_tokenizer())
    number = 0
    for split, name in rows_module.SPLITS.items():
        for line in read_jsonl(run.answers_dir / name):
            want = renderer.render(Sample.from_json(line))
            assert number in rows.of(split) and rows.sample_ids[number] == line["id"]
            assert rows.token_ids(number).tolist() == want.token_ids[:64]
            assert rows.loss_mask(number).tolist() == want.loss_mask[:64]
            assert rows.sources[number] == "toy" and rows.length(number) == len(rows.token_ids(number))
            number += 1
    assert number == len(rows) == 10
    assert rows.num_tokens("train") + rows.num_tokens("heldout") == rows.offsets[-1]
    assert rows.num_supervised["train"] == sum(rows.loss_mask(row).sum() for row in rows.of("train"))


def test_the_files_do_not_depend_on_the_number_of_processes_or_the_size_of_a_chunk(run, tmp_path, monkeypatch):
    one = files_of(render(run))
    other = make_run(tmp_path / "other", data__num_processes=2)
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", 100)
    files = tiny.prepare(other.target)
    jobs = [job for split, name in rows_module.SPLITS.items()
            for job in rows_module.split_jobs(other, files, split, other.answers_dir / name)]  # fmt: skip
    assert len(jobs) >= 2 * rows_module.JOBS_A_PROCESS
    assert files_of(render(other)) == one


def test_they_are_made_once_and_anew_for_other_answers_or_limits(run, monkeypatch):
    first = render(run)
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "render_all", lambda *a: pytest.fail("rendered again"))
        assert render(run).folder == first.folder
    run.extract.max_tokens = 40
    cut = render(run)
    assert cut.folder != first.folder and cut.num_cut > 0 and np.diff(cut.offsets).max() == 40
    write_answers(run, seed=1)
    assert render(run).folder not in (first.folder, cut.folder)


def test_files_that_are_cut_are_refused_by_name(run):
    rows = render(run)
    path = rows.folder / "token_ids.i32"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"token_ids.i32\n(.|\n)*delete"):
        RenderedRows(rows.folder)


def test_an_id_that_comes_twice_and_a_line_that_is_no_json_are_refused_and_leave_no_rows(run):
    path = run.answers_dir / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    with pytest.raises(UserError, match=r"sample train-0\n.*twice"):
        render(run)
    path.write_text(lines[0] + lines[1][:30] + "\n")
    with pytest.raises(UserError, match=rf"samples.jsonl, byte {len(lines[0])}\n"):
        render(run)
    assert not list((run.answers_dir.parents[2] / "rendered").glob("*"))


def test_an_answers_file_without_a_row_gives_no_rows(run):
    (run.answers_dir / "heldout.jsonl").write_text("")
    rows = render(run)
    assert len(rows) == 8 and len(rows.of("heldout")) == rows.num_tokens("heldout") == 0
    (run.answers_dir / "samples.jsonl").write_text("")
    with pytest.raises(UserError, match="no sample with a supervised token"):
        render(run)


def test_an_index_line_names_a_row(run):
    rows = render(run)
    sample_id, source, content_hash = json.loads((rows.folder / "index.jsonl").read_text().splitlines()[0])
    assert (sample_id, source) == ("train-0", "toy") and len(content_hash) == 16
    assert rows.content_hashes[0] == content_hash


# ---------------------------------------------------------------- an iterator in a thread


def test_an_iterator_ahead_gives_its_items_in_order_and_then_its_error():
    def items():
        yield from range(5)
        raise KeyError("end")

    got = []
    with ahead.Ahead(items()) as early, pytest.raises(KeyError):
        for item in early:
            got.append(item)
    assert got == list(range(5)) and early.finished


def test_an_iterator_ahead_makes_no_more_than_its_depth_before_it_is_asked():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    with ahead.Ahead(items(), depth=2) as early:
        assert next(iter(early)) == 0
    early._thread.join(5)
    assert not early._thread.is_alive() and len(made) <= 5


def test_an_iterator_ahead_does_nothing_more_once_it_is_left():
    done, begun = [], threading.Event()

    def items():
        yield 0
        begun.set()
        time.sleep(0.2)  # a request on its way
        done.append("claimed")
        yield 1

    with ahead.Ahead(items()) as early:
        assert next(iter(early)) == 0 and begun.wait(5)
    assert done == ["claimed"], "what comes after the consumer's end is known to it"


# ---------------------------------------------------------------- folders that are whole or absent


def test_a_killed_runs_folder_is_not_in_the_way_and_goes_when_it_is_old(tmp_path):
    left = tmp_path / f".rows.{os.getpid()}.tmp"
    left.mkdir()
    (left / "token_ids.i32").write_bytes(b"x")
    with atomic_folder(tmp_path / "rows") as temporary:
        (temporary / "facts.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "rows"]
    assert remove_unused(tmp_path, 60, 600) == []
    for path in (left, left / "token_ids.i32"):
        os.utime(path, (time.time() - 100,) * 2)
    for path in (tmp_path / "rows", tmp_path / "rows" / "facts.json"):
        os.utime(path, (time.time() - 100,) * 2)
    assert remove_unused(tmp_path, 60, 600) == [left.name] and (tmp_path / "rows").is_dir()
    assert remove_unused(tmp_path, 60, 60) == ["rows"]


def test_rows_that_no_run_has_used_for_long_go_when_others_are_rendered(run, capsys):
    first = render(run)
    for path in (first.folder, *first.folder.iterdir()):
        os.utime(path, (time.time() - 2 * UNUSED_S,) * 2)
    render(run)  # it is in use
    run.extract.max_tokens = 48
    second = render(run)
    assert first.folder.is_dir()
    for path in (first.folder, *first.folder.iterdir()):
        os.utime(path, (time.time() - 2 * UNUSED_S,) * 2)
    run.extract.max_tokens = 32
    render(run)
    assert not first.folder.exists() and second.folder.is_dir()
    assert first.folder.name in capsys.readouterr().out
