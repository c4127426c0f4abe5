"""Rules that every conversation passes: roles, content, thinking marks, turn structure.

Each rule either repairs a message, and says so in `repairs`, or raises `Drop(reason)` for the whole row; the mixer
counts both. The rules and their order come from defects measured on real chat data; nothing here depends on a tokenizer
(the renderer checks the target's own special tokens exactly). Text itself is `text.py`'s, tools are `schemas.py`'s.
"""

import re
import unicodedata

from dflash_train.data.schemas import clean_id, clean_tool_calls
from dflash_train.data.text import PLACEHOLDERS, Drop, clean_text, content_text, parse_literal

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
MAX_HTML_SHARE = 0.3  # of a message's characters in tags, outside code fences: a scraped page, not a turn
MIN_HTML_TAGS = 5

_HTML_TAG = re.compile(
    r"</?(?:a|b|br|button|code|div|em|h[1-6]|hr|i|img|input|li|ol|p|path|pre|script|section|span|strong|style|svg|table"
    r"|tbody|td|th|thead|tr|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_CONTROL_SYSTEM = re.compile(r"(?:detailed thinking (?:on|off)|/no_think|/think)", re.IGNORECASE)
_SWITCHES = ("/no_think", "/think")


def _without_reasoning(text: str) -> str:
    """What follows the last closed thought, up to one that is never closed: templates show earlier turns without
    their reasoning."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def _without_switch(text: str) -> str:
    """A user text without the "/think" or "/no_think" at its end."""
    for switch in _SWITCHES:
        head = text.removesuffix(switch)
        if head != text and (not head or head[-1].isspace()):
            return head.rstrip()
    return text


def is_mostly_html(text: str) -> bool:
    """More than MAX_HTML_SHARE of the text are HTML tags, code fences not counted."""
    if text.count("<") < MIN_HTML_TAGS:
        return False
    prose = "".join(text.split("```")[::2])
    tags = _HTML_TAG.findall(prose)
    return len(tags) >= MIN_HTML_TAGS and sum(map(len, tags)) > MAX_HTML_SHARE * len(prose)


def _clean_message(raw: object, index: int, repairs: set[str]) -> dict:
    """One message with a known role and clean str content; index: its place, for ids of its calls. Raises Drop."""
    if not isinstance(raw, dict):
        raise Drop("message_not_an_object")
    role = ROLES.get(raw["role"].strip().lower()) if isinstance(raw.get("role"), str) else None
    if role is None:
        raise Drop("unknown_role")
    text = clean_text(content_text(raw.get("content"), role, repairs), repairs).strip()
    message = {"role": role, "content": text}
    if role in ("user", "assistant") and is_mostly_html(text):
        raise Drop("mostly_html")
    if role == "assistant":
        _clean_assistant(raw, message, f"call_{index}", repairs)
    elif role == "tool":
        message |= {key: text for key in ("tool_call_id", "name") if (text := clean_id(raw.get(key)))}
    elif role == "user":
        message["content"] = _without_switch(text)
    elif _CONTROL_SYSTEM.fullmatch(text):
        message["content"] = ""
    if role in ("user", "system") and message["content"] != text:
        repairs.add("thinking_switch_removed")
    return message


def _clean_assistant(raw: dict, message: dict, prefix: str, repairs: set[str]) -> None:
    if "<think>" in message["content"] or "</think>" in message["content"]:
        message["content"] = _without_reasoning(message["content"])
        repairs.add("reasoning_removed")
    calls = clean_tool_calls(raw["tool_calls"], prefix) if raw.get("tool_calls") else []
    if not calls and raw.get("function_call"):  # what OpenAI had before tool_calls
        calls = clean_tool_calls([raw["function_call"]], prefix)
    if calls:
        message["tool_calls"] = calls
    if isinstance(raw.get("reasoning_content"), str) and raw["reasoning_content"].strip():
        message["reasoning_content"] = clean_text(raw["reasoning_content"], repairs).strip()


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
    messages = _merge([_clean_message(item, index, repairs) for index, item in enumerate(raw)], repairs)
    system = []
    if messages[0]["role"] == "system":
        system = [messages[0]] if messages[0]["content"] else []
        messages = messages[1:]
    while messages and messages[0]["role"] == "assistant":
        messages = messages[1:]
        repairs.add("leading_assistant_removed")
    turns = _turns(messages, repairs)
    if not turns:
        raise Drop("no_user_turn")
    return system + turns


def _turns(messages: list[dict], repairs: set[str]) -> list[dict]:
    """The messages after the system's, each tool result with the id and name of the call it answers. Raises Drop."""
    out: list[dict] = []
    open_calls: list[dict] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system":
            raise Drop("system_not_first")
        if role == "user":
            if not text or text in PLACEHOLDERS:
                raise Drop("empty_user" if not text else "placeholder_user")
        elif role == "assistant":
            if not text and "tool_calls" not in message:
                repairs.add("cut_at_empty_assistant")
                break
        else:
            if not open_calls:
                raise Drop("tool_result_without_call")
            wanted = message.get("tool_call_id")
            call = open_calls.pop(next((i for i, call in enumerate(open_calls) if call["id"] == wanted), 0))
            if "tool_call_id" not in message:
                repairs.add("tool_call_id_filled")
            message = {**message, "tool_call_id": message.get("tool_call_id", call["id"]),
                       "name": message.get("name", call["function"]["name"])}  # fmt: skip
        if role != "tool":
            if open_calls:
                repairs.add("call_left_unanswered")
            open_calls = list(message.get("tool_calls", []))
        out.append(message)
    return out


def normalized(text: str) -> str:
    """What exact deduplication compares: NFKC, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())
