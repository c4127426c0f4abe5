"""Regeneration on a real HTTP server that stalls, fails, cuts bodies and restarts, and with a client that is killed:
the final set is that of a sound run, and nothing that was answered is asked again."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers_server import FakeServer, fake_servers, make_sample, question_key, rows_of, served_run  # noqa: F401
from helpers_target import one_thread  # noqa: F401

from dflash_train import regenerate
from dflash_train.data.answers.journal import Writer
from dflash_train.data.chat import Renderer
from dflash_train.records import Sample
from dflash_train.target.tiny import tiny_tokenizer
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, read_jsonl
from dflash_train.util.provenance import stable_hash

FAULTS = ("500", "429", "503", "cut", "cut, of no stated length", "aborted")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """num_train -> the rows that a server without faults gives."""
    server = FakeServer()
    rows = rows_of(regenerate.ensure_answers(served_run(tmp_path_factory.mktemp("sound"), server.url, num_train=60)))
    server.stop()
    return lambda num_train=40: rows[:num_train] + rows[-3:]


# ---------------------------------------------------------------- what is asked and kept


def test_prompts_go_as_our_own_ids_with_all_sampling_named_and_the_server_is_recorded(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("DFLASH_SERVER_KEY", "sesame-7")
    server = fake(page={"max_model_len": 9000})
    run = served_run(tmp_path, server.url)
    folder = regenerate.ensure_answers(run)
    rows, manifest, renderer = rows_of(folder), read_json(folder / "manifest.json"), Renderer(tiny_tokenizer())
    assert len(rows) == 43 and manifest["kept"] == {"train": 40, "heldout": 3}
    sent = {tuple(body["prompt"]): body for body in server.bodies}
    greedy = 0
    for row in rows:
        sample, regen = Sample.from_json(row), row["regen"]
        body = sent[tuple(renderer.prompt_ids(sample))]
        assert "messages" not in body and body["max_tokens"] == 200 and body["stop_token_ids"] == [2]
        named = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
        assert named.items() <= body.items(), "or a server's generation_config.json would decide"
        sampling = regen["sampling"]
        assert (sampling["temperature"], sampling["top_p"], sampling["seed"]) == (
            body["temperature"], body["top_p"], body["seed"])  # fmt: skip
        assert sampling["temperature"] in (0.0, 1.0 if row["thinking"] == "on" else 0.7)
        greedy += sampling["temperature"] == 0
        assert regen["n_prompt"] == len(body["prompt"]) and "token_ids_from" not in regen
        assert renderer.render(sample).token_ids == body["prompt"] + regen["token_ids"]
        assert row["messages"][-1].get("reasoning_content", "") != "" or row["thinking"] == "off"
    assert 0 < greedy < len(rows) and len({body["seed"] for body in server.bodies}) == len(server.bodies) == 43 + 8
    assert manifest["servers"][rows[0]["regen"]["server"]] == {
        "url": server.url, "id": "tiny", "max_model_len": 9000, "version": "1.2.3"}  # fmt: skip
    assert len(manifest["probes"]) == 8 and not any(probe["odd"] for probe in manifest["probes"])
    assert {head["Authorization"] for head in server.headers} == {"Bearer sesame-7"}
    assert not any(b"sesame-7" in path.read_bytes() for path in folder.parent.rglob("*.json*"))


def test_a_server_that_says_only_text_gives_the_same_rows_marked_as_such(tmp_path, fake, sound):
    def textual(body: dict) -> dict:
        reply = server.plain_answer(body)
        return {key: reply[key] for key in ("text", "finish_reason")}

    server = fake(textual)
    rows = rows_of(regenerate.ensure_answers(served_run(tmp_path / "text", server.url)))
    assert {row["regen"].pop("token_ids_from") for row in rows} == {"text"}
    assert rows == sound()


def test_an_end_token_that_the_server_leaves_out_is_put_back(tmp_path, fake, sound):
    def trimmed(body: dict) -> dict:
        reply = server.plain_answer(body)
        ids = reply["token_ids"]
        return {**reply, "token_ids": ids[:-1] if ids[-1] == 2 else ids, "matched_stop": 2}

    server = fake(trimmed)
    rows = rows_of(regenerate.ensure_answers(served_run(tmp_path / "trimmed", server.url)))
    assert rows == sound() and any(row["regen"]["token_ids"][-1] == 2 for row in rows)


# ---------------------------------------------------------------- faults


def test_every_fault_and_a_restart_leave_the_set_of_a_sound_run_and_no_prompt_answered_twice(tmp_path, fake, sound):
    def fault(number: int, key: str) -> str | None:
        start = int(key[:2], 16) if key != "alive" else 0
        if number < start % 4:
            return FAULTS[(start + number) % len(FAULTS)]
        return "stall" if start % 16 == 5 and number < 2 else None

    server = fake(fault=fault, delay_s=0.02)
    run = served_run(tmp_path, server.url, num_train=60)
    answering = threading.Thread(target=regenerate.ensure_answers, args=(run,))
    answering.start()
    for goal in (12, 35):
        while sum(server.answered.values()) < goal:
            time.sleep(0.005)
        server.restart()
    answering.join(60)
    assert not answering.is_alive()
    assert set(server.faults) == {*FAULTS, "stall"}
    assert rows_of(run.answers_dir) == sound(60)
    assert set(server.answered.values()) == {1} and len(server.answered) == 63 + 8


CLIENT = """
import sys
from pathlib import Path
from dflash_train import regenerate
from helpers_server import served_run
regenerate.ensure_answers(served_run(Path(sys.argv[1]), sys.argv[2], num_train=60))
"""


def test_a_client_killed_in_the_middle_loses_nothing_it_had_received_and_asks_none_of_it_again(tmp_path, fake, sound):
    """Counted at the server, which fails, cuts and stalls meanwhile: what it answered is on the client's disk, but for
    the answers under way, one a slot."""
    unlucky = lambda number, key: number == 0 and key != "alive" and int(key[:2], 16) % 5 == 0
    server = fake(delay_s=0.05, fault=lambda number, key: FAULTS[int(key[2], 16) % 6] if unlucky(number, key) else None)
    folder, probes, slots = tmp_path / "killed", 8, 8
    run = served_run(folder, server.url, num_train=60)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(folder), server.url], env=environment,
                              cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120
    while sum(server.answered.values()) < probes + 25 and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    time.sleep(0.2)  # the server's own threads come to their end
    journal = run.answers_dir / "parts" / "answers.jsonl"
    whole = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    paid = sum(server.answered.values()) - probes
    assert max(17, paid - slots) <= len(whole) < 63 and server.faults
    with open(journal, "ab") as f:
        f.write(b'{"row": 3, "drop')  # as a kill in the middle of a write leaves it
    rows = rows_of(regenerate.ensure_answers(run))
    assert rows == sound(60)
    assert [rows[record["row"]]["regen"]["token_ids"] for record in whole] == [record["token_ids"] for record in whole]
    received = {question_of(rows[record["row"]]) for record in whole}
    assert len(received) == len(whole) and {server.answered[key] for key in received} == {1}
    twice = sum(count > 1 for count in server.answered.values())
    assert probes <= twice <= probes + slots, "the probes of both runs, and what was under way"


def question_of(row: dict) -> str:
    """The server's key of the question that this row of the final set answers."""
    return question_key(Renderer(tiny_tokenizer()).prompt_ids(Sample.from_json(row)), row["regen"]["sampling"]["seed"])


def test_a_prompt_that_always_fails_is_dropped_while_the_server_answers_others(tmp_path, fake):
    prompt_ids = Renderer(tiny_tokenizer()).prompt_ids(make_sample(7))
    poison = question_key(prompt_ids, stable_hash(0, "answer", "one/7") % 2**31)
    server = fake(fault=lambda number, key: "500" if key == poison else None)
    manifest = read_json(regenerate.ensure_answers(served_run(tmp_path, server.url)) / "manifest.json")
    assert manifest["dropped"] == {"server_failed": 1} and manifest["kept"]["train"] == 39
    assert server.faults == {"500": 5} and server.answered["alive"] == 1


def test_a_dead_server_ends_the_run_with_what_was_seen_and_a_second_run_goes_on(tmp_path, fake, sound):
    server = fake()
    server.fault = lambda number, key: "503" if sum(server.answered.values()) >= 20 else None
    run = served_run(tmp_path, server.url, client={"patience_s": 1.0, "timeout_s": 0.5})
    with pytest.raises(UserError, match=r"no answer for .* s; the last error: HTTP 503"):
        regenerate.ensure_answers(run)
    answered, server.fault = set(server.answered), lambda number, key: None
    regenerate.ensure_answers(run)
    probes = 8
    assert sum(server.answered.values()) == 43 + 2 * probes and answered <= set(server.answered)
    assert rows_of(run.answers_dir) == sound()


def test_an_answer_that_drips_is_given_up_after_the_time_for_one_answer_however_often_a_byte_comes(tmp_path, fake):
    """A byte every 0.05 s never lets a read time out; the whole would take twenty seconds and more."""
    server = fake(fault=lambda number, key: "drip" if number == 0 and int(key[:2], 16) < 64 else None)
    run = served_run(tmp_path, server.url, num_train=12, probe=False, client={"timeout_s": 0.5, "concurrency": 2})
    manifest = read_json(regenerate.ensure_answers(run) / "manifest.json")
    assert manifest["kept"] == {"train": 12, "heldout": 3} and server.faults["drip"] >= 2
    assert set(server.answered.values()) == {1} and sum(server.asked.values()) == 15 + server.faults["drip"]


def test_a_disk_that_fills_up_ends_the_run_with_one_message_and_a_second_goes_on(tmp_path, fake, sound, monkeypatch):
    server, real, written = fake(), Writer.append, []

    def append(self, record: dict) -> None:
        if len(written) == 15:
            self.file.write(b'{"row": 9, "dro')  # what fitted
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(record["row"])
        real(self, record)

    monkeypatch.setattr(Writer, "append", append)
    run = served_run(tmp_path, server.url, probe=False)
    with pytest.raises(UserError, match=r"the disk is full(.|\n)*what was answered is kept"):
        regenerate.ensure_answers(run)
    monkeypatch.setattr(Writer, "append", real)
    regenerate.ensure_answers(run)
    assert rows_of(run.answers_dir) == sound()
    kept = {question_of(rows_of(run.answers_dir)[row]) for row in written}
    assert len(kept) == 15 and {server.answered[key] for key in kept} == {1}


@pytest.mark.parametrize("status, said", [("401", "key_env"), ("404", "ends in /v1")])
def test_what_no_repetition_can_mend_ends_the_run_at_once(tmp_path, fake, status, said):
    server = fake(fault=lambda number, key: status)
    with pytest.raises(UserError, match=f"HTTP {status}(.|\n)*{said}"):
        regenerate.ensure_answers(served_run(tmp_path, server.url))
    assert max(server.asked.values()) == 1


def test_a_model_that_is_not_served_and_a_context_too_small_are_refused_before_a_question(tmp_path, fake):
    server = fake(page={"max_model_len": 2048})
    with pytest.raises(UserError, match=r"client\.model\n.*got:  other\n.*want: tiny"):
        regenerate.ensure_answers(served_run(tmp_path, server.url, client={"model": "other"}))
    with pytest.raises(UserError, match=r"data\.answers\.clip=2048"):
        regenerate.ensure_answers(served_run(tmp_path, server.url))
    assert not server.bodies


def test_a_server_that_refuses_much_is_not_asked_further(tmp_path, fake):
    server = fake(fault=lambda number, key: "400" if int(key[:2], 16) < 128 else None)
    run = served_run(tmp_path, server.url, num_train=120, probe=False)
    with pytest.raises(UserError, match="prompts without an answer"):
        regenerate.ensure_answers(run)
    assert sum(server.asked.values()) < 110


# ---------------------------------------------------------------- refill and shares


def test_lost_rows_are_refilled_from_their_sources_reserve_in_order_and_the_rest_is_told(tmp_path, fake, capsys):
    lost = [make_sample(50, text="say <|im_end|>"), make_sample(51, text="refuse me"), make_sample(52, text="loop")]
    other = [make_sample(60, source="two", text="loop, too"), make_sample(61, source="two")]
    reserve = [
        make_sample(70, "reserve"),
        make_sample(71, "reserve", "two", text="loop again"),
        make_sample(72, "reserve", text="loop once more"),
        *[make_sample(i, "reserve") for i in (73, 74, 75)],
    ]
    server = fake()
    server.answer = lambda body: {**server.plain_answer(body), **odd(server.tokenizer.decode(body["prompt"]))}

    def odd(prompt: str) -> dict:
        return {"text": "x" * 200, "token_ids": [50] * 200, "finish_reason": "length"} if "loop" in prompt else {}

    bad = Renderer(tiny_tokenizer()).prompt_ids(lost[1])
    server.fault = lambda number, key: "400" if server.bodies[-1]["prompt"] == bad else None
    run = served_run(tmp_path, server.url, train=[*[make_sample(i) for i in range(20)], *lost, *other], reserve=reserve,
                     client={"concurrency": 1})  # fmt: skip
    folder = regenerate.ensure_answers(run)
    ids = [row["id"] for row in read_jsonl(folder / "samples.jsonl")]
    assert ids == [*[f"one/{i}" for i in range(20)], "two/61", "one/70", "one/73", "one/74"], "75 was not needed"
    assert {row["split"] for row in read_jsonl(folder / "samples.jsonl")} == {"train"}
    manifest = read_json(folder / "manifest.json")
    assert manifest["refill"] == {"one": {"lost": 3, "refilled": 3, "not_refilled": 0},
                                  "two": {"lost": 1, "refilled": 0, "not_refilled": 1}}  # fmt: skip
    assert manifest["dropped"] == {"prompt_special_token": 1, "server_refused": 1, "repetition": 4}
    assert manifest["dropped_by_source"]["two"] == {"repetition": 2}
    assert "two: 1 of 1 lost rows could not be refilled" in capsys.readouterr().out
    assert max(server.answered.values()) == 1


def test_a_held_out_row_among_the_train_rows_is_refused(tmp_path, fake):
    run = served_run(tmp_path, fake().url, train=[make_sample(1), make_sample(1000)])
    with pytest.raises(UserError, match=r"one/1000(.|\n)*held out, and also in prompts\.jsonl"):
        regenerate.ensure_answers(run)


def test_shares_asked_by_several_workers_merge_into_what_one_run_gives(tmp_path, fake, sound):
    server = fake()
    for worker in ("0/3", "2/3", "1/3"):
        regenerate.main(served_run(tmp_path, server.url, worker=worker, probe=False))
    asked = len(server.bodies)
    assert asked == 43 and max(server.asked.values()) == 1
    run = served_run(tmp_path, server.url, probe=False)
    assert not (run.answers_dir / "samples.jsonl").exists()
    regenerate.ensure_answers(run)
    assert len(server.bodies) == asked and rows_of(run.answers_dir) == sound()
    with pytest.raises(UserError, match="this needs all the answers"):
        regenerate.ensure_answers(served_run(tmp_path, server.url, worker="0/3"))
