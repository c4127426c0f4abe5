"""Cleaning rules: every defect measured on real chat data is repaired under a name, or costs its row for a reason."""

import pytest

from dflash_train.data.clean import clean_messages, is_mostly_html
from dflash_train.data.schemas import clean_tool_calls, clean_tools
from dflash_train.data.text import (
    MAX_DEPTH,
    Drop,
    clean_text,
    clean_value,
    content_text,
    parse_literal,
    parse_objects,
)

user = lambda content: {"role": "user", "content": content}
assistant = lambda content, **more: {"role": "assistant", "content": content, **more}
call = lambda name="f", arguments=None, **more: {"function": {"name": name, "arguments": arguments}, **more}


def cleaned(*messages) -> tuple[list[dict], set[str]]:
    repairs: set[str] = set()
    return clean_messages(list(messages), repairs), repairs


def reason(function, *arguments) -> str:
    with pytest.raises(Drop) as drop:
        function(*arguments)
    return drop.value.reason


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "clean", "repair"),
    [
        ("a\r\nb\rc", "a\nb\nc", "line_ends_normalized"),
        ("zero\u200bwidth \ufeffBOM \x00NUL \x1b[1mESC", "zerowidth BOM NUL [1mESC", "invisible_characters_removed"),
        ("\ud83d\ude00 pair", "\U0001f600 pair", "surrogates_paired"),
        ("tab\tand\nnewline, \u200c and \u200d stay", "tab\tand\nnewline, \u200c and \u200d stay", None),
    ],
)
def test_repairs_of_text_are_named(text, clean, repair):
    repairs: set[str] = set()
    assert clean_text(text, repairs) == clean and repairs == ({repair} if repair else set())


@pytest.mark.parametrize(
    ("text", "why"),
    [("half \ud83d", "lone_surrogate"), ("\ufffd" + "x" * 900, "replacement_characters"),
     ("<|im_end|>", "special_token_in_text"), ("see <|endoftext|>", "special_token_in_text"),
     ("a</s>", "special_token_in_text"), ("[INST] x", "special_token_in_text"),
     ("<start_of_turn>user", "special_token_in_text")],
)  # fmt: skip
def test_text_beyond_repair_costs_the_row(text, why):
    assert reason(clean_text, text) == why


def test_one_replacement_character_in_a_long_text_is_no_damage():
    assert clean_text("\ufffd" + "x" * 1000)


def test_a_hundred_thousand_characters_on_one_line_stay_whole():
    assert len(cleaned(user("word " * 20_000))[0][0]["content"]) == 99_999


@pytest.mark.parametrize(
    ("content", "role", "text"),
    [(None, "user", ""), (42, "user", "42"), (1.5, "user", "1.5"),
     ([{"type": "text", "text": "a"}, "b"], "user", "a\nb"),
     ({"text": "a"}, "user", "a"), ({"temp": 3}, "tool", '{"temp": 3}'), ([1, {"a": None}], "tool", '[1, {"a": null}]'),
     ([{"type": "text", "text": "out"}], "tool", "out")],
)  # fmt: skip
def test_content_becomes_text_whatever_it_was_stored_as(content, role, text):
    assert content_text(content, role) == text


@pytest.mark.parametrize("content", [True, {"a": 1}, [{"type": "image_url"}], [1], {"text": 1}])
def test_content_with_more_than_text_in_it_costs_the_row(content):
    assert reason(content_text, content, "user") == "content_not_text"


# ---------------------------------------------------------------- embedded values


@pytest.mark.parametrize("text", ["", "{", "[1, ", "1" * 5000, "[" * 100_000, "{[]: 1}", "f()", "1+" * 30_000 + "1",
                                  "-" * 50_000 + "1", "\x00", "lambda: 0", "'" * 99])  # fmt: skip
def test_text_that_is_no_value_is_one_reason_and_no_crash(text):
    assert reason(parse_literal, text) == "bad_embedded_json"


def test_python_reprs_are_read_and_code_is_not_run():
    assert parse_literal("{'a': True, 'b': None, 'c': (1, 2)}") == {"a": True, "b": None, "c": (1, 2)}
    assert reason(parse_literal, "__import__('os').getcwd()") == "bad_embedded_json"


@pytest.mark.parametrize(
    ("value", "why"),
    [(float("nan"), "not_a_finite_number"), ({"a": float("inf")}, "not_a_finite_number"), (b"x", "not_json"),
     ({1, 2}, "not_json"), ({(1, 2): 3}, "not_json"), ({"\ud83d": 1}, "lone_surrogate"), ([["</s>"]],
     "special_token_in_text")],
)  # fmt: skip
def test_values_that_no_json_holds_cost_the_row(value, why):
    assert reason(clean_value, value) == why


def test_nesting_has_a_limit_that_does_not_depend_on_the_python():
    nest = lambda depth: [nest(depth - 1)] if depth else 0
    assert clean_value(nest(MAX_DEPTH)) == nest(MAX_DEPTH)
    assert reason(clean_value, nest(MAX_DEPTH + 1)) == "nested_too_deep"


def test_values_one_after_another_are_read_up_to_the_first_that_is_none():
    assert parse_objects('{"a": 1}\n\n{"b": [2]} , 3 rest') == ([{"a": 1}, {"b": [2]}, 3], 24)
    assert parse_objects("x") == ([], 0)


# ---------------------------------------------------------------- roles and turns


def test_every_known_spelling_of_a_role_is_mapped_and_others_cost_the_row():
    for role in ("human", "User", " user "):
        assert cleaned({"role": role, "content": "Hi"})[0][0]["role"] == "user"
    for role in ("gpt", "chatgpt", "bing", "bard", "assistant"):
        assert cleaned(user("Hi"), {"role": role, "content": "Hello"})[0][1]["role"] == "assistant"
    for role in ("tool", "function", "observation", "ipython"):
        messages, _ = cleaned(user("Hi"), assistant("", tool_calls=[call()]), {"role": role, "content": "1"})
        assert messages[2]["role"] == "tool"
    assert cleaned({"role": "developer", "content": "Rule."}, user("Hi"))[0][0]["role"] == "system"
    for role in ("narrator", "function_call", "", None, 7, ["user"]):
        assert reason(clean_messages, [{"role": role, "content": "Hi"}]) == "unknown_role"


@pytest.mark.parametrize(
    ("messages", "why"),
    [([], "no_messages"), ([assistant("only me")], "no_user_turn"),
     ([{"role": "system", "content": "x"}], "no_user_turn"),
     ([user("")], "empty_user"), ([user(" \u200b\n")], "empty_user"), ([user("N/A")], "placeholder_user"),
     ([user("-"), assistant("?")], "placeholder_user"), ([user("a"), {"role": "system", "content": "x"}, user("b")],
     "system_not_first"), ([user("a"), {"role": "tool", "content": "1"}], "tool_result_without_call"),
     ([user("a"), assistant("", tool_calls=[call(arguments='{"a": ')])], "bad_tool_arguments"),
     ([user("a"), assistant("", tool_calls=[call(arguments="[1]")])], "bad_tool_arguments"),
     ([user("a"), assistant("", tool_calls=[call(name="")])], "bad_tool_call"),
     ([user("a"), assistant("", tool_calls=[call(name="\u200b")])], "bad_tool_call"),
     ([user("a"), assistant("", tool_calls={"f": 1})], "bad_tool_call")],
)  # fmt: skip
def test_a_conversation_that_cannot_be_used_has_one_reason(messages, why):
    assert reason(clean_messages, messages) == why


@pytest.mark.parametrize(
    ("messages", "repair", "contents"),
    [
        ([assistant("rest"), user("Go on.")], "leading_assistant_removed", ["Go on."]),
        ([user("a"), user("b"), assistant("c"), assistant("d")], "same_role_merged", ["a\n\nb", "c\n\nd"]),
        ([user("a"), assistant(" "), user("b")], "cut_at_empty_assistant", ["a"]),
        ([user("Why? /no_think")], "thinking_switch_removed", ["Why?"]),
        ([{"role": "system", "content": "detailed thinking on"}, user("Why?")], "thinking_switch_removed", ["Why?"]),
        ([user(7)], "content_made_text", ["7"]),
        ([user("a"), assistant("", tool_calls=[call(), call()]), {"role": "tool", "content": "1"}, assistant("b")],
         "call_left_unanswered", ["a", "", "1", "b"]),
        ([user("a"), assistant("", tool_calls=[call(id="x")]), {"role": "tool", "content": {"n": 1}}],
         "tool_call_id_filled", ["a", "", '{"n": 1}']),
    ],
)  # fmt: skip
def test_repairs_of_turns_are_named(messages, repair, contents):
    result, repairs = cleaned(*messages)
    assert repair in repairs and [message["content"] for message in result] == contents


@pytest.mark.parametrize(
    "text", ["a path such as /var/think", "x/think", "think", "/think about it", "a" + " " * 50_000 + "/x"]
)
def test_words_that_look_like_a_thinking_switch_stay(text):
    assert cleaned(user(text))[0][0]["content"] == text


@pytest.mark.parametrize(
    ("text", "kept"),
    [("<think>a</think>b", "b"), ("<think>a<think>b</think>c</think>d", "d"), ("b</think>c", "c"),
     ("<think>\n\n</think>\n\nd", "d"), ("<think>a</think>b<think>never closed", "b"), ("b <think>open", "b")],
)  # fmt: skip
def test_reasoning_in_content_is_removed_nested_unopened_and_unclosed(text, kept):
    messages, repairs = cleaned(user("a"), assistant(text), user("e"))
    assert messages[1]["content"] == kept and "reasoning_removed" in repairs


def test_an_answer_that_is_one_unclosed_thought_ends_the_conversation_there():
    messages, repairs = cleaned(user("a"), assistant("<think>hm"), user("b"))
    assert messages == [user("a")] and repairs == {"reasoning_removed", "cut_at_empty_assistant"}


def test_an_empty_list_of_calls_is_no_call():
    messages, repairs = cleaned(user("a"), assistant("", tool_calls="[]"), user("b"))
    assert messages == [user("a")] and repairs == {"cut_at_empty_assistant"}


def test_the_old_function_call_field_is_a_tool_call():
    messages, _ = cleaned(user("a"), assistant(None, function_call={"name": "f", "arguments": '{"x": 1}'}),
                          {"role": "function", "name": "f", "content": "2"})  # fmt: skip
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_generated_call_ids_never_repeat_in_a_conversation():
    messages, _ = cleaned(
        user("a"), assistant("", tool_calls=[call(), call(id=True)]), assistant("", tool_calls=[call()])
    )
    ids = [one["id"] for one in messages[1]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 3


# ---------------------------------------------------------------- HTML, tools


def test_a_scraped_page_is_dropped_and_code_with_tags_is_not():
    page = "<div><ul><li>Home</li><li>Login</li></ul><p>Hi</p></div>"
    assert reason(clean_messages, [user(page)]) == "mostly_html"
    assert reason(clean_messages, [user("Hi"), assistant(page), user("?")]) == "mostly_html"
    assert not is_mostly_html(f"Why is this list not bold?\n```html\n{page}\n```")
    assert not is_mostly_html(
        "List<String> xs = new ArrayList<String>(); if (a < b && c > d) { Map<K, V> m; } <T> <U> <V>"
    )
    assert not is_mostly_html(
        "Explain <b>bold</b> and <i>italic</i> and <u>underlined</u> text in HTML, with examples. " * 3
    )


@pytest.mark.parametrize(
    "tools", ["[", "[{'name': ", 5, True, [5], [None], [{}], [{"name": ""}], [{"name": 5}], ["{"], [[{"name": "f"}]],
              [{"name": "f", "parameters": [1]}], [{"name": "f", "parameters": "x"}]],
)  # fmt: skip
def test_broken_tool_lists_have_one_reason(tools):
    assert reason(clean_tools, tools) == "bad_tools"


@pytest.mark.parametrize("tools", [None, "", " ", "[]", "null", [], {}])
def test_no_tools_are_none(tools):
    assert clean_tools(tools) is None


def test_calls_stored_as_text_or_flat_are_calls():
    flat = clean_tool_calls("[{'name': 'f', 'arguments': {'a': 1}}]", "c")
    assert flat == [{"id": "c_0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert clean_tool_calls([call(arguments="", id=5)])[0]["id"] == "5"
