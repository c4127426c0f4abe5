"""Rules that every row of every source passes: text cleaning, roles, content kinds, turn structure.

Each rule either repairs a message or raises `Drop(reason)` for the whole row; the mixer counts the reasons. The rules
and their order come from defects measured on real chat data; nothing here depends on a tokenizer (the renderer checks
the target's own special tokens exactly).
"""

import ast
import json
import re
import unicodedata

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
PLACEHOLDERS = {"-", "N/A", "<N/A>", "n/a", "<noinput>"}
MAX_REPLACEMENT_SHARE = 0.001  # of U+FFFD, above which the text was damaged before it reached us

# ZWJ and ZWNJ (U+200C/D) stay: they spell words in Persian and Indic scripts and join emoji.
_INVISIBLE = re.compile("[\u200b\u2060\ufeff\x00-\x08\x0b-\x1f\x7f]")
SURROGATE = re.compile("[\ud800-\udfff]")
# What chat templates of common models write around turns: <|im_end|>, <｜User｜>, [INST], <start_of_turn>, </s>.
_CONTROL_TOKEN = re.compile(
    r"<\|[A-Za-z][\w ./-]{0,60}\|>|<｜[^｜<>\n]{1,60}｜>|\[/?INST\]|<</?SYS>>|</?(?:start|end)_of_turn>|</s>"
)
_CONTROL_SYSTEM = re.compile(r"\s*(?:detailed thinking (?:on|off)|/no_think|/think)\s*", re.IGNORECASE)
_CONTROL_SUFFIX = re.compile(r"(?:^|\s+)/(?:no_)?think\s*$")


class Drop(Exception):
    """This row cannot be used; `reason` is the manifest's counter."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


def clean_text(text: str) -> str:
    """Valid Unicode with \\n line ends and no invisible controls. Raises Drop for text that is damaged beyond
    repair."""
    if SURROGATE.search(text):
        # JSON's "\ud83d\ude00" cut into two Python strings re-pairs through UTF-16; a half alone cannot be encoded at
        # all.
        try:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            raise Drop("lone_surrogate") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _INVISIBLE.sub("", text)
    if text.count("\ufffd") > MAX_REPLACEMENT_SHARE * len(text):
        raise Drop("replacement_characters")
    if _CONTROL_TOKEN.search(text):
        raise Drop("special_token_in_text")
    return text


def content_text(content: object, role: str) -> str:
    """The text of a message's content, whatever it was stored as. Raises Drop where there is more than text in it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, bool):
        raise Drop("content_not_text")
    if isinstance(content, int | float):
        return str(content)
    if role == "tool":  # results are data; the model reads them as JSON
        return json.dumps(content, ensure_ascii=False)
    if isinstance(content, dict):
        content = [content]
    parts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise Drop("content_not_text")
        parts.append(text)
    return "\n".join(parts)


def parse_literal(text: str) -> object:
    """JSON, or a Python literal where a data set stored repr(). Raises Drop."""
    try:
        return json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Drop("bad_embedded_json") from None


def clean_tool_calls(calls: object) -> list[dict]:
    """Any spelling of tool calls -> [{id, type, function: {name, arguments: mapping}}]. Raises Drop."""
    if isinstance(calls, str):
        calls = parse_literal(calls)
    if not isinstance(calls, list):
        raise Drop("bad_tool_call")
    out = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Drop("bad_tool_call")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
            except (json.JSONDecodeError, RecursionError):
                raise Drop("bad_tool_arguments") from None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise Drop("bad_tool_arguments")
        name = clean_text(function["name"])
        out.append({"id": clean_text(str(call.get("id") or f"call_{number}")), "type": "function",
                    "function": {"name": name, "arguments": clean_strings(arguments)}})  # fmt: skip
    return out


def clean_strings(value: object) -> object:
    """`clean_text` on every string inside a JSON value, keys included."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [clean_strings(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(str(key)): clean_strings(item) for key, item in value.items()}
    return value


_JSON_TYPES = {"dict": "object", "float": "number", "double": "number", "int": "integer", "long": "integer",
               "str": "string", "bool": "boolean", "tuple": "array", "list": "array", "List": "array",
               "Dict": "object"}  # fmt: skip


def json_schema(schema: object) -> object:
    """Python type names in a parameter schema -> JSON Schema's; the type 'any' is left out, which means the same."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            if value.lower() == "any":
                continue
            value = _JSON_TYPES.get(value, value)
        elif key == "properties" and isinstance(value, dict):  # its keys are parameter names, 'type' among them
            value = {name: json_schema(item) for name, item in value.items()}
        elif key not in ("default", "enum", "const", "examples"):  # those hold values, not schemas
            value = json_schema(value)
        out[key] = value
    return out


def clean_tools(tools: object) -> list[dict] | None:
    """Any spelling of a tool list -> [{type: function, function: {name, description, parameters}}], None for no
    tools."""
    if isinstance(tools, str):
        tools = parse_literal(tools) if tools.strip() else None
    if not tools:
        return None
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list):
        raise Drop("bad_tools")
    out = []
    for tool in tools:
        tool = parse_literal(tool) if isinstance(tool, str) else tool
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Drop("bad_tools")
        parameters = json_schema(function.get("parameters") or {"type": "object", "properties": {}})
        if not isinstance(parameters, dict):
            raise Drop("bad_tools")
        out.append({"type": "function", "function": clean_strings({
            "name": function["name"], "description": str(function.get("description") or ""),
            "parameters": parameters})})  # fmt: skip
    return out


def _clean_message(raw: object, repairs: set[str]) -> dict:
    """One message with a known role and clean str content. Raises Drop."""
    if not isinstance(raw, dict):
        raise Drop("message_not_an_object")
    role = ROLES.get(str(raw.get("role")).strip().lower())
    if role is None:
        raise Drop("unknown_role")
    text = clean_text(content_text(raw.get("content"), role)).strip()
    message = {"role": role, "content": text}
    if role == "assistant":
        if "</think>" in text:  # templates show earlier turns without their reasoning
            message["content"] = text.rpartition("</think>")[2].strip()
            repairs.add("reasoning_removed")
        elif "<think>" in text:
            message["content"] = ""  # never closed: there is no answer in it
        if raw.get("tool_calls"):
            message["tool_calls"] = clean_tool_calls(raw["tool_calls"])
        if isinstance(raw.get("reasoning_content"), str) and raw["reasoning_content"].strip():
            message["reasoning_content"] = clean_text(raw["reasoning_content"]).strip()
    elif role == "tool":
        for key in ("tool_call_id", "name"):
            if raw.get(key) is not None:
                message[key] = clean_text(str(raw[key]))
    elif role == "user":
        message["content"] = _CONTROL_SUFFIX.sub("", text)
    elif _CONTROL_SYSTEM.fullmatch(text):
        message["content"] = ""
    if role in ("user", "system") and message["content"] != text:
        repairs.add("thinking_switch_removed")
    return message


def _merge(messages: list[dict], repairs: set[str]) -> list[dict]:
    """Neighbours of the same role become one message; tool results stay apart, they answer different calls."""
    out: list[dict] = []
    for message in messages:
        if not out or out[-1]["role"] != message["role"] or message["role"] == "tool":
            out.append(message)
            continue
        last = out[-1]
        repairs.add("same_role_merged")
        texts = [text for text in (last["content"], message["content"]) if text]
        merged = {**last, **message, "content": "\n\n".join(texts)}
        if "tool_calls" in last or "tool_calls" in message:
            merged["tool_calls"] = last.get("tool_calls", []) + message.get("tool_calls", [])
        out[-1] = merged
    return out


def clean_messages(raw: object, repairs: set[str] | None = None) -> list[dict]:
    """A raw message list -> system? (user (assistant | assistant-with-calls tool+)*)+, ending anywhere. Raises Drop.

    Leading assistant turns go (conversations that were split in the middle), an empty assistant turn cuts the
    conversation there, an empty or placeholder user turn drops the row, and so does a system message after the first
    turn. The names of what was repaired are added to `repairs`.
    """
    repairs = set() if repairs is None else repairs
    if isinstance(raw, str):
        raw = parse_literal(raw)
    if not isinstance(raw, list):
        raise Drop("messages_not_a_list")
    if not raw:
        raise Drop("no_messages")
    messages = _merge([_clean_message(item, repairs) for item in raw], repairs)
    system = []
    if messages[0]["role"] == "system":
        system = [messages[0]] if messages[0]["content"] else []
        messages = messages[1:]
    while messages and messages[0]["role"] == "assistant":
        messages = messages[1:]
        repairs.add("leading_assistant_removed")
    out: list[dict] = []
    open_calls: list[dict] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system":
            raise Drop("system_not_first")
        if role == "user":
            if not text or text in PLACEHOLDERS:
                raise Drop("empty_user" if not text else "placeholder_user")
            open_calls = []
        elif role == "assistant":
            if not text and "tool_calls" not in message:
                repairs.add("cut_at_empty_assistant")
                break
            open_calls = list(message.get("tool_calls", []))
        else:
            if not open_calls:
                raise Drop("tool_result_without_call")
            wanted = message.get("tool_call_id")
            call = open_calls.pop(next((i for i, call in enumerate(open_calls) if call["id"] == wanted), 0))
            message = {**message, "tool_call_id": message.get("tool_call_id", call["id"]),
                       "name": message.get("name", call["function"]["name"])}  # fmt: skip
        out.append(message)
    if not out:
        raise Drop("no_user_turn")
    return system + out


def normalized(text: str) -> str:
    """What exact deduplication compares: NFKC, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())
