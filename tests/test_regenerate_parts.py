"""The pieces of regeneration: the journal, locks, pauses, refills, the pinned template."""

import asyncio
import dataclasses
import itertools
import random

import httpx
import pytest
from helpers_server import make_sample

from dflash_train.config import AnswersConfig, ClientConfig, TargetConfig
from dflash_train.data.answers import server as asking
from dflash_train.data.answers.completions import Retry, read_choice, request_id
from dflash_train.data.answers.journal import Journal, Writer, claim
from dflash_train.data.answers.mix_rows import FILES, MixRows
from dflash_train.data.answers.rules import Sampling, refill
from dflash_train.data.answers.windows import limits_of
from dflash_train.target import tiny
from dflash_train.target.tiny import tiny_tokenizer
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_jsonl
from dflash_train.util.provenance import template_hash

# ---------------------------------------------------------------- journal


def records(count: int) -> list[dict]:
    return [{"row": i, "dropped": "empty" if i % 5 == 0 else None, "token_ids": list(range(i))} for i in range(count)]


def write(path, some) -> Journal:
    journal = Journal(path.parent)
    writer = Writer(path, journal)
    for record in some:
        writer.append(record)
    writer.close()
    return journal


def test_a_journal_cut_anywhere_gives_back_every_whole_record_and_goes_on_behind_them(tmp_path):
    """Every length the file may have had when its process was killed."""
    path = tmp_path / "answers.jsonl"
    write(path, records(6))
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = data[:size].count(b"\n")
        assert set(Journal(tmp_path).places) == set(range(whole))
        journal = write(path, records(6)[whole:])
        assert path.read_bytes() == data and [journal[i] for i in range(6)] == records(6)


def test_records_are_found_across_files_and_the_first_of_two_counts(tmp_path):
    write(tmp_path / "a.jsonl", records(4))
    write(tmp_path / "b.jsonl", [{"row": 2, "dropped": "repetition"}, *records(9)[4:]])
    journal = Journal(tmp_path)
    assert [journal[i] for i in range(9)] == records(9) and journal.dropped == {0: "empty", 5: "empty"}


def test_a_whole_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"row": 1, "dropped": null}\nnonsense\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        Journal(tmp_path)


def test_one_process_a_share_and_none_beside_the_whole(tmp_path):
    """Locks are of open files, so one process can try them all."""
    with claim(tmp_path, "0/2"):
        for other in ("0/2", None, "0/3"):
            with pytest.raises(UserError, match="another process is writing"), claim(tmp_path, other):
                pass
        with claim(tmp_path, "1/2"):
            pass
    with claim(tmp_path, None):
        for other in (None, "0/2", "7/9"):
            with pytest.raises(UserError, match="another process is writing"), claim(tmp_path, other):
                pass
    with claim(tmp_path, "0/3"):
        pass


# ---------------------------------------------------------------- the mix's rows


def mix_of(folder, **splits) -> MixRows:
    for name, ids in splits.items():
        write_jsonl(folder / FILES[name], ({**make_sample(0).to_json(), "id": row_id} for row_id in ids))
    return MixRows(folder)


def test_rows_are_numbered_train_held_out_reserve_and_read_one_by_one(tmp_path):
    rows = mix_of(tmp_path, train=["a", "b"], heldout=["c"], reserve=["d", "e"])
    assert [rows[i].id for i in range(len(rows))] == list("abcde")
    assert [rows.split(i) for i in range(5)] == ["train", "train", "heldout", "reserve", "reserve"]


@pytest.mark.parametrize("splits, said", [
    ({"train": ["a", "b", "b"]}, r"row b\n.*twice: \S*prompts\.jsonl:2 and \S*prompts\.jsonl:3"),
    ({"train": ["a", "b"], "reserve": ["c", "a"]}, r"row a\n.*twice: \S*prompts\.jsonl:1 and \S*reserve\.jsonl:2"),
    ({"train": ["a", "b"], "heldout": ["b"]},
     r"row b\n.*held out, and also in prompts\.jsonl: \S*prompts\.jsonl:2 and \S*heldout\.jsonl:1"),
    ({"train": ["a"], "heldout": ["b"], "reserve": ["c", "d", "b"]},
     r"row b\n.*held out, and also in reserve\.jsonl: \S*heldout\.jsonl:1 and \S*reserve\.jsonl:3"),
])  # fmt: skip
def test_an_id_that_comes_twice_is_refused_with_both_its_lines(tmp_path, splits, said):
    with pytest.raises(UserError, match=said):
        mix_of(tmp_path, **splits)


# ---------------------------------------------------------------- refill


def test_refills_are_the_reserves_first_rows_that_are_not_lost_and_a_resumed_run_chooses_the_same():
    rng = random.Random(0)
    for _ in range(200):
        sources = [rng.choice("ab") for _ in range(40)]
        train, reserve = range(25), {}
        for row in range(25, 40):
            reserve.setdefault(sources[row], []).append(row)
        lost = {row for row in range(40) if rng.random() < 0.3}
        answered, chosen = set(train), []
        for _ in range(20):  # wave by wave, the fate of a reserve row known only once it was asked
            chosen = refill((lost & answered).__contains__, train, reserve, sources.__getitem__)
            answered |= set(chosen)
        for name in "ab":
            want = sum(row in lost for row in train if sources[row] == name)
            good = [row for row in reserve.get(name, []) if row not in lost][:want]
            mine = [row for row in chosen if sources[row] == name]
            assert [row for row in mine if row not in lost] == good
            last = good[-1] if len(good) == want and want else max(reserve.get(name, [0]))
            assert all(row <= last for row in mine), "none behind the last that was needed"
            assert mine or not want or not reserve.get(name)


# ---------------------------------------------------------------- the server's pauses


def prompt_of(*ids: int) -> asking.Prompt:
    return asking.Prompt(0, list(ids), Sampling(0.0, 1.0, 0), room=4)


def test_pauses_double_with_jitter_up_to_a_limit_and_never_below_what_the_server_asks(monkeypatch):
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asking.asyncio, "sleep", sleep)
    server = asking.Server("http://x/v1", ClientConfig(backoff_s=0.5, patience_s=1000), (2,))
    for tries in range(1, 12):
        asyncio.run(server._pause(Retry("HTTP 503"), tries))
    for seconds, full in zip(slept, (min(30.0, 0.5 * 2**i) for i in itertools.count())):
        assert full / 2 <= seconds <= full
    assert len({seconds / 30 for seconds in slept[-5:]}) == 5, "jitter"
    asyncio.run(server._pause(Retry("HTTP 429", 77.0), 1))
    assert slept[-1] == 77.0


@pytest.mark.parametrize("body", ["", '{"choices": [', '{"choices": []}', "[]", '{"choices": [{"text": "x"}]}'])
def test_a_body_that_is_no_completion_is_asked_again(body):
    with pytest.raises(Retry):
        read_choice(httpx.Response(200, text=body))


def test_a_request_id_names_the_question():
    same = {request_id(prompt_of(1, 2)) for _ in range(3)}
    assert len(same) == 1 and request_id(prompt_of(1, 3)) not in same
    assert request_id(dataclasses.replace(prompt_of(1, 2), seed=5)) not in same


# ---------------------------------------------------------------- limits, configuration, template


def test_limits_leave_room_for_an_answer_within_clip_and_context():
    limits = limits_of(AnswersConfig(), 262_144)
    assert (limits.context, limits.max_prompt, limits.window) == (8192, 7168, 6144)
    assert limits.room(100) == 4096 and limits.room(7168) == 1024
    small = limits_of(AnswersConfig(max_new_tokens=64), 2048)
    assert (small.context, small.max_prompt, small.window) == (2048, 1984, 1984)


@pytest.mark.parametrize("changes, named", [
    ({"server": "localhost:8000"}, "data.answers.server"),
    ({"server": "http://me:secret@host/v1"}, "credentials"),
    ({"worker": "4/4"}, "data.answers.worker"),
    ({"answer_room": 9000}, "answer_room"),
    ({"server": "http://h/v1", "client": ClientConfig(timeout_s=100, patience_s=10)}, "timeout_s"),
])  # fmt: skip
def test_what_cannot_work_is_refused_by_name_and_no_secret_is_said(changes, named):
    with pytest.raises(UserError, match=named) as error:
        AnswersConfig(**changes).check()
    assert "secret" not in str(error.value)


def test_a_pinned_template_is_checked_wherever_the_target_is_prepared(tmp_path):
    """Trap 11: a hub revision or a file that changed under the data is refused, naming both hashes."""
    found = template_hash(tiny_tokenizer())
    config = TargetConfig(name="tiny", kind="tiny", dtype="float32", template_hash=found)
    assert tiny.prepare(config).tokenizer.chat_template
    other = tmp_path / "other.jinja"
    other.write_text(tiny_tokenizer().chat_template + " ")
    with pytest.raises(UserError, match=f"template_hash(.|\n)*{found}, but"):
        tiny.prepare(dataclasses.replace(config, chat_template=str(other)))
