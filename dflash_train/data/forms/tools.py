"""Forms of function-calling data sets. Each of them writes tools and calls in its own syntax, in columns or inside
prose; what comes out has tools as JSON Schema and calls as mappings, and no text that explains a call syntax: the
target's own template says how it calls."""

import json
import re
from itertools import islice

from dflash_train.data.forms.base import Form, Hints, as_list, ask, check_calls, with_system, word
from dflash_train.data.forms.calls import glaive_call, toolace_calls
from dflash_train.data.schemas import clean_tools, python_type
from dflash_train.data.text import Drop, Skip, parse_literal, parse_objects

# ---------------------------------------------------------------- xLAM


def from_xlam(row: dict, hints: Hints) -> dict:
    """Salesforce/xlam-function-calling-60k: tools as JSON text, whose parameters have Python types. Its answers are not
    read: the target answers anew."""
    tools = parse_literal(row["tools"], "bad_tools") if isinstance(row.get("tools"), str) else row.get("tools")
    if not isinstance(tools, list) or not tools:
        raise Drop("bad_tools")
    return {"messages": ask(row.get("query")), "tools": clean_tools([_xlam_tool(tool) for tool in tools])}


def _xlam_tool(tool: object) -> dict:
    tool = tool.get("function", tool) if isinstance(tool, dict) else tool
    parameters = (tool.get("parameters") or {}) if isinstance(tool, dict) else None
    if not isinstance(parameters, dict):
        raise Drop("bad_tools")
    if isinstance(parameters.get("type"), str) and isinstance(parameters.get("properties"), dict):
        return tool  # JSON Schema already
    properties, required = {}, []
    for name, parameter in parameters.items():
        if not isinstance(parameter, dict) or not isinstance(parameter.get("type", ""), str):
            raise Drop("bad_tools")
        kind, comma, flag = parameter.get("type", "").rpartition(",")
        optional = bool(comma) and flag.strip().lower() == "optional"
        properties[name] = {**python_type(kind if optional else parameter.get("type", "")),
                            **{key: value for key, value in parameter.items() if key != "type"}}  # fmt: skip
        if not optional:
            required.append(name)
    return {**tool, "parameters": {"type": "object", "properties": properties, "required": required}}


# ---------------------------------------------------------------- glaive


_GLAIVE_TURN = re.compile(r"(?:\A|(?<=\n\n))[ \t]*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_LIST = "with access to the following functions"


def from_glaive(row: dict, hints: Hints) -> dict:
    """glaiveai/glaive-function-calling-v2: `system` is a sentence with functions as JSON after it, `chat` is all turns
    in one text."""
    system, chat = row.get("system") or "", row.get("chat")
    if not isinstance(system, str) or not isinstance(chat, str):
        raise Drop("content_not_text")
    system, tools = system.strip().removeprefix("SYSTEM:").strip(), None
    if _GLAIVE_LIST in system:
        start = system.find("{")
        values, end = parse_objects(system, start) if start >= 0 else ([], 0)
        if not values or system[end:].strip():
            raise Drop("bad_tools")
        system, tools = "", clean_tools(values)
    messages = [message for turn in _glaive_turns(chat.strip()) for message in _glaive_messages(*turn)]
    check_calls(messages, tools)
    return {"messages": with_system(system, messages), "tools": tools}


def _glaive_turns(chat: str) -> list[tuple[str, str]]:
    """(role, text) of every turn."""
    head, *parts = _GLAIVE_TURN.split(chat)
    if head.strip() or not parts:
        raise Drop("unknown_role")
    return [(_GLAIVE_ROLES[name], text.strip()) for name, text in zip(parts[::2], parts[1::2])]


def _glaive_messages(role: str, text: str) -> list[dict]:
    if role == "user":
        return [{"role": role, "content": text}]
    text = text.removesuffix("<|endoftext|>").strip()
    prose, *calls = text.split("<functioncall>") if role == "assistant" else [text]
    if not calls:
        return [{"role": role, "content": text}]
    return [{"role": role, "content": prose.strip(), "tool_calls": [glaive_call(call) for call in calls]}]


# ---------------------------------------------------------------- Hermes


def from_hermes(row: dict, hints: Hints) -> dict:
    """NousResearch/hermes-function-calling-v1: ShareGPT turns with calls and results in tags. The tool list stands in
    `tools` and again inside the system text, where it is removed with the call syntax explained after it.
    func_calling_singleturn is left out: its rows are the first turns of func_calling."""
    if hints.subset == "func_calling_singleturn":
        raise Skip("repeats_func_calling")
    turns = as_list(row.get("conversations"), "messages_not_a_list")
    tools, notes, messages = clean_tools(row.get("tools")), (), []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Drop("message_not_an_object")
        role, text = turn.get("from"), turn.get("value")
        if role == "system" and isinstance(text, str) and "<tools>" in text:
            tools, notes = tools or clean_tools(_hermes_list(text)), ("tool_list_removed_from_system",)
            text = _hermes_system(text)
        messages += _hermes_messages(role, text) if isinstance(text, str) else [{"role": role, "content": text}]
    check_calls(messages, tools)
    return {"messages": messages, "tools": tools, "kind": word(hints.subset), "notes": notes}


def _hermes_list(text: str) -> object:
    """The tools in the last <tools> block."""
    body = text.rpartition("<tools>")[2].partition("</tools>")[0].strip()
    values, end = parse_objects(body)
    if not values or body[end:].strip():
        return parse_literal(body, "bad_tools")
    return values[0] if isinstance(values[0], list) else values


def _hermes_system(text: str) -> str:
    """The system text without what explains the tools: from its first words on them to the example of a call."""
    end = max(text.rfind(tag) + len(tag) if tag in text else 0 for tag in ("</tools>", "</tool_call>", "<tools>"))
    head = text[: text.find("<tools>")].partition("You are provided with function signatures")[0].strip()
    return f"{head.removeprefix('You are a function calling AI model.').strip()}\n{text[end:].strip()}".strip()


def _hermes_messages(role: object, text: str) -> list[dict]:
    if role == "gpt" and "<tool_call>" in text:
        prose, bodies = _tagged(text, "tool_call")
        return [
            {"role": role, "content": prose, "tool_calls": [call for body in bodies for call in _hermes_calls(body)]}
        ]
    if role == "tool" and "<tool_response>" in text:
        return [_hermes_result(body) for body in _tagged(text, "tool_response")[1]]
    return [{"role": role, "content": text}]


def _tagged(text: str, tag: str) -> tuple[str, list[str]]:
    """(the text outside of <tag> blocks, what is inside of each). The last block need not be closed."""
    outside, *parts = text.split(f"<{tag}>")
    blocks = [part.partition(f"</{tag}>") for part in parts]
    return "\n".join(t for t in (outside.strip(), *(b[2].strip() for b in blocks)) if t), [b[0].strip() for b in blocks]


def _hermes_calls(body: str) -> list:
    """Calls as JSON objects, or as Python's repr of them."""
    values, end = parse_objects(body)
    if not values or body[end:].strip():
        values = [parse_literal(body, "bad_tool_call")]
    return values[0] if isinstance(values[0], list) else values


def _hermes_result(body: str) -> dict:
    """{"name", "content"} -> its content; anything else stays the text it is."""
    try:
        value = parse_literal(body)
    except Drop:
        value = None
    if not isinstance(value, dict) or "content" not in value:
        return {"role": "tool", "content": body}
    return {"role": "tool", "content": value["content"], "name": value.get("name")}


# ---------------------------------------------------------------- ToolACE, BFCL


def from_toolace(row: dict, hints: Hints) -> dict:
    """Team-ACE/ToolACE: the system prompt is an instruction in prose with the tools as JSON in it, calls are bracketed
    text."""
    system = row.get("system")
    tools = _list_in_prose(system) if isinstance(system, str) else None
    tools, system = clean_tools(tools), None if tools else system
    names = [tool["function"]["name"] for tool in tools or ()]
    messages: list[dict] = []
    for turn in as_list(row.get("conversations"), "messages_not_a_list"):
        if not isinstance(turn, dict):
            raise Drop("message_not_an_object")
        role, text = turn.get("from"), turn.get("value")
        last = messages[-1] if messages else {}
        if role == "assistant" and isinstance(text, str) and names and text.strip().startswith("["):
            messages.append({"role": role, "content": "", "tool_calls": toolace_calls(text.strip(), names)})
        elif role == "tool" and isinstance(text, str) and "tool_calls" in last:
            messages += _toolace_results(text, len(last["tool_calls"]))
        else:
            messages.append({"role": role, "content": text})
    check_calls(messages, tools)
    return {"messages": with_system(system, messages), "tools": tools}


def _list_in_prose(text: str) -> list | None:
    """The first JSON list of named objects in a text, looked for at its first 20 places that look like one."""
    for found in islice(re.finditer(r"\[\s{0,20}\{", text), 20):
        values, _ = parse_objects(text, found.start())
        if values and isinstance(values[0], list) and all(isinstance(v, dict) and "name" in v for v in values[0]):
            return values[0]
    return None


def _toolace_results(text: str, num_calls: int) -> list[dict]:
    """One message per call where the text is a list of as many results, else one message."""
    values, end = parse_objects(text)
    results = values[0] if len(values) == 1 and not text[end:].strip() else None
    if not isinstance(results, list) or len(results) != num_calls:
        return [{"role": "tool", "content": text}]
    return [{"role": "tool", "content": json.dumps(result, ensure_ascii=False)} for result in results]


def from_bfcl(row: dict, hints: Hints) -> dict:
    """Berkeley function-calling questions: a list of turns, of which the first can be asked, and tools whose types are
    Python's or Java's. Rows that name classes instead of tools have those elsewhere."""
    if "function" not in row:
        raise Skip("tools_not_in_row")
    question = as_list(row.get("question"), "messages_not_a_list")
    if not question:
        raise Drop("no_messages")
    return {"messages": question[0], "tools": clean_tools(row["function"])}


FORMS = {
    "xlam": Form(from_xlam, (("query",), ("tools",))),
    "glaive": Form(from_glaive, (("system",), ("chat",))),
    "hermes": Form(from_hermes, (("conversations",),)),
    "toolace": Form(from_toolace, (("system",), ("conversations",))),
    "bfcl": Form(from_bfcl, (("question",), ("function", "involved_classes"))),
}
