"""A template with everything that Qwen3.6's has (a fixture of our own): what the target reads, what is supervised, and
where a long session may be cut."""

from pathlib import Path

import pytest

from dflash_train.data.answers.rules import answered, drop_reason
from dflash_train.data.answers.tool_calls import tool_calls
from dflash_train.data.answers.windows import Limits, cut_middle, fit, head_length, legal_cuts
from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.data.rendering import Rows
from dflash_train.records import Sample
from dflash_train.target.tiny import tiny_tokenizer

TEMPLATE = (Path(__file__).parent / "fixtures" / "templates" / "thinking_xml.jinja").read_text("utf-8")
USER = {"role": "user", "content": " What is 2+2? \n"}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {}}} for name in ("add", "say")
]
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1, 2]}}},
    {"id": "2", "type": "function", "function": {"name": "say", "arguments": {"text": "two\nlines"}}},
]
CALL_TEXT = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n[1, 2]\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=say>\n<parameter=text>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Renderer(tokenizer)


def sample(messages, thinking="off", tools=None, regen=None, bucket="chat") -> Sample:
    return Sample("s-1", "test", "MIT", bucket, "train", thinking, messages, tools, {}, regen)


def split(r: Renderer, s: Sample) -> tuple[str, str]:
    """(context, supervised text)."""
    rendered = r.render(s)
    start = rendered.loss_mask.index(True)
    assert rendered.token_ids[:start] == r.prompt_ids(s) and all(rendered.loss_mask[start:])
    return r.tokenizer.decode(rendered.token_ids[:start]), r.tokenizer.decode(rendered.token_ids[start:])


def answer(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def test_modes_differ_in_the_scaffold_alone_which_is_context(renderer):
    """Trap 11: "off" closes the thought in the prompt, "on" leaves it to the target."""
    assert renderer.has_thinking_modes and renderer.opens_thought == {"on": True, "off": False}
    context, supervised = split(renderer, sample([USER, answer(" 4. ")], "off"))
    assert context.endswith("user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert supervised == "4.<|im_end|>"
    context, supervised = split(renderer, sample([USER, answer("4.", reasoning_content="\nhm\n")], "on"))
    assert context.endswith("<|im_start|>assistant\n<think>\n") and supervised == "hm\n</think>\n\n4.<|im_end|>"


def test_earlier_thoughts_are_left_out_once_another_question_comes_and_kept_within_one(renderer):
    """Trap 10: the history is what serving would show; each turn of a conversation is its own row."""
    turns = [USER, answer("4.", reasoning_content="early"), {"role": "user", "content": "Sure?"},
             answer("", reasoning_content="look", tool_calls=CALLS[:1]), {"role": "tool", "content": "4"},
             answer("Yes.", reasoning_content="late")]  # fmt: skip
    context, supervised = split(renderer, sample(turns, "on", TOOLS))
    assert "early" not in context and "<think>\nlook\n</think>" in context
    assert supervised == "late\n</think>\n\nYes.<|im_end|>"
    first, second = (renderer.render(sample(turns[:end], "on", TOOLS)).token_ids for end in (2, 4))
    assert second[: len(first)] != first, "the negative control: the render of a prefix is no prefix"


def test_calls_are_xml_of_mapping_arguments_and_results_in_a_row_share_one_turn(renderer):
    """Trap 12."""
    results = [{"role": "tool", "content": " 4 "}, {"role": "tool", "content": "ok"}]
    turns = [USER, answer("Wait.", tool_calls=CALLS), *results, answer("4.")]
    context, _ = split(renderer, sample(turns, "off", TOOLS))
    assert "Wait.\n\n" + CALL_TEXT + "<|im_end|>\n" in context and '"name": "add"' in context
    shared = "<tool_response>\n4\n</tool_response>\n<tool_response>\nok\n</tool_response>"
    assert f"<|im_start|>user\n{shared}<|im_end|>\n<|im_start|>assistant" in context
    _, supervised = split(renderer, sample(turns[:2], "off", TOOLS))
    assert supervised == "Wait.\n\n" + CALL_TEXT + "<|im_end|>"


def test_arguments_that_are_a_text_are_dropped_and_named(renderer):
    bad = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    with pytest.raises(RenderDrop, match="tool_arguments"):
        renderer.prompt_ids(sample([USER, answer("", tool_calls=[bad]), {"role": "tool", "content": "4"}], tools=TOOLS))


@pytest.mark.parametrize("messages", [
    [USER, answer("4."), {"role": "system", "content": "late"}, USER],
    [answer("hello"), {"role": "tool", "content": "4"}],
    [{"role": "judge", "content": "x"}, USER],
])  # fmt: skip
def test_orders_the_template_refuses_are_counted_drops(renderer, messages):
    with pytest.raises(RenderDrop) as drop:
        renderer.prompt_ids(sample(messages))
    assert drop.value.reason == "template_error" and drop.value.detail


# ---------------------------------------------------------------- the invariant, on every row


def regenerated(r: Renderer, text: str, thinking: str = "off", finish_reason: str = "stop") -> Sample:
    ids = r.tokenizer.encode(text, add_special_tokens=False) + ([2] if finish_reason == "stop" else [])
    s = sample([USER], thinking)
    return answered(s, {"token_ids": ids, "finish_reason": finish_reason}, r.tokenizer, r.has_thinking_modes)


def test_what_regenerate_writes_passes_the_invariant_and_what_was_changed_since_does_not(renderer):
    """Trap 9: checked when rows are rendered, not only here."""
    good = [regenerated(renderer, "It is 4."), regenerated(renderer, "hm\n</think>\n\n4.", "on"),
            regenerated(renderer, "hm and", "on", "length")]  # fmt: skip
    for s in good:
        renderer.render(s)
    changed = Sample(**{**good[0].to_json(), "messages": [USER, answer("It is 5.")]})
    without_end = Sample(
        **{**good[0].to_json(), "regen": {**good[0].regen, "token_ids": good[0].regen["token_ids"][:-1]}}
    )
    thought = Sample(**{**good[1].to_json(), "messages": [USER, answer("4.", reasoning_content="no")]})
    rows = Rows()
    lines = [{**s.to_json(), "id": str(i)} for i, s in enumerate([*good, changed, without_end, thought])]
    rows.add(lines, "train", renderer, 1000)
    assert sorted(rows.rows) == ["0", "1", "2"] and rows.dropped == {"mask_invariant": 3}


def test_a_tokenizer_that_does_not_give_the_text_back_is_caught(renderer, monkeypatch):
    """Trap 9: the negative control, a tokenizer that loses a character."""
    s = sample([USER, answer("It is 4.")])
    renderer.render(s)
    real = renderer.tokenizer.decode
    monkeypatch.setattr(renderer.tokenizer, "decode", lambda *a, **k: real(*a, **k).replace("4", ""))
    with pytest.raises(RenderDrop, match="mask_invariant"):
        renderer.render(s)


def test_short_answers_are_dropped_only_where_they_come_from_the_data(renderer):
    lines = [{**sample([USER, answer("x" * n)]).to_json(), "id": str(n)} for n in (30, 31)]
    lines.append(regenerated(renderer, "short").to_json())
    rows = Rows()
    rows.add(lines, "train", renderer, 1000, min_answer_tokens=32)
    assert sorted(rows.rows) == ["31", "s-1"] and rows.dropped == {"short_answer": 1}, "the end token counts"


# ---------------------------------------------------------------- windows


def session(num_steps: int, width: int = 40) -> Sample:
    """system, task, then steps of a call and two results."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "mend the code"}]
    for i in range(num_steps):
        messages += [answer(f"step {i} " + "x" * width, tool_calls=CALLS),
                     {"role": "tool", "content": f"first {i}"}, {"role": "tool", "content": f"second {i}"}]  # fmt: skip
    return sample(messages, tools=TOOLS, bucket="agentic")


@pytest.mark.parametrize("window", (900, 1500, 2500, 100_000))
def test_a_long_session_is_cut_between_steps_and_keeps_its_head(renderer, window):
    limits = Limits(100_000, 8, 100_000, window, 100)
    s = session(12)
    ids, num_cut = fit(s, renderer, limits)
    assert len(ids) <= window and ids == renderer.prompt_ids(cut_middle(s, num_cut))
    text = renderer.tokenizer.decode(ids)
    assert "be brief" in text and "mend the code" in text and "second 11" in text
    kept = cut_middle(s, num_cut).messages
    assert [m["role"] for m in kept[2:]] == ["assistant", "tool", "tool"] * ((len(kept) - 2) // 3)
    assert num_cut % 3 == 0 and (num_cut == 0) == (window == 100_000)
    if num_cut:  # and no more was cut than had to be: one more step would not fit
        assert len(renderer.prompt_ids(cut_middle(s, num_cut - 3))) > window - 3 * len(CALLS) * 40


def test_a_session_whose_head_and_last_step_do_not_fit_is_dropped(renderer):
    with pytest.raises(RenderDrop, match="too_long"):
        fit(session(5, width=600), renderer, Limits(100_000, 8, 100_000, 700, 100))


def test_only_agentic_rows_are_cut_others_are_dropped_by_length(renderer):
    limits = Limits(1000, 8, 300, 200, 700)
    short, long = sample([USER]), sample([{"role": "user", "content": "y" * 400}])
    assert fit(short, renderer, limits)[1] == 0
    for s, reason, changed in ((long, "too_long", limits), (short, "too_short", Limits(1000, 500, 900, 900, 100))):
        with pytest.raises(RenderDrop) as drop:
            fit(s, renderer, changed)
        assert drop.value.reason == reason
    assert limits.room(100) == 700 and limits.room(900) == 100


def test_cuts_are_legal_before_assistant_turns_alone():
    s = session(3)
    assert head_length(s.messages) == 2 and legal_cuts(s) == [0, 3, 6]


# ---------------------------------------------------------------- tool calls in answers


def test_calls_are_read_in_both_spellings():
    assert tool_calls(CALL_TEXT) == [{"name": "add", "arguments": {"a": "2", "b": "[1, 2]"}},
                                     {"name": "say", "arguments": {"text": "two\nlines"}}]  # fmt: skip
    hermes = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert tool_calls(hermes + " and " + hermes) == [{"name": "add", "arguments": {"a": 2}}] * 2
    assert tool_calls("<tool_call>\n{'name': 'add'}\n</tool_call>") == [None]
    assert tool_calls("no call") == tool_calls("<tool_call>\n<function=add>\n<param") == []


def test_calls_of_unknown_tools_and_broken_calls_are_dropped(renderer):
    encode = lambda text: renderer.tokenizer.encode(text, add_special_tokens=False)
    reason = lambda text, tools=TOOLS: drop_reason([*encode(text), 2], "stop", renderer.tokenizer, 1.0, tools=tools)
    assert reason(CALL_TEXT) is None
    assert reason(CALL_TEXT, TOOLS[:1]) == reason(CALL_TEXT, None) == "unknown_tool"
    assert reason("<tool_call>\nadd(2)\n</tool_call>") == "broken_tool_call"
    assert reason("<think>maybe <tool_call>x</tool_call></think>\n\nno") is None, "thoughts call nothing"


def test_a_finished_answer_inside_its_thought_is_dropped_and_a_cut_one_is_kept(renderer):
    ids = renderer.tokenizer.encode("let me see", add_special_tokens=False)
    reason = lambda ids, finish, inside: drop_reason(ids, finish, renderer.tokenizer, 0.5, in_thought=inside)
    assert reason([*ids, 2], "stop", True) == "unclosed_think" and reason(ids, "length", True) is None
    assert reason([*ids, 2], "stop", False) is None
    assert (
        reason([3, *ids, 2], "stop", False) == "unclosed_think" and reason([3, *ids, 4, *ids, 2], "stop", False) is None
    )
    assert reason([3, 4, 2], "stop", False) == "empty"
