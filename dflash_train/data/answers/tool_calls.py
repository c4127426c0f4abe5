"""Tool calls in a target's raw answer text, in the two spellings that open models use inside <tool_call> tags:
a JSON object (Hermes, Qwen 2.5 and 3) or nested <function=..><parameter=..> tags (Qwen3-Coder, Qwen3.5 and later)."""

import json
import re

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def tool_calls(text: str) -> list[dict | None]:
    """{"name", "arguments"} of every closed call in the text, in order; None for one that is neither spelling. A call
    that the text's end cuts off is not listed. Arguments of the tag spelling are texts."""
    bodies = (part.partition(CLOSE) for part in text.split(OPEN)[1:])
    return [parse(body) for body, closed, _ in bodies if closed]


def parse(body: str) -> dict | None:
    if found := _FUNCTION.fullmatch(body):
        return {"name": found[1].strip(), "arguments": dict(_PARAMETER.findall(found[2]))}
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return {"name": call["name"], "arguments": arguments} if isinstance(arguments, dict) else None


def tool_call_problem(text: str, tools: list[dict] | None) -> str | None:
    """What is wrong with the calls: "unknown_tool" (not among the tools) | "broken_tool_call" (unreadable) | None."""
    known = {tool["function"]["name"] for tool in tools or ()}
    for call in tool_calls(text):
        if call is None:
            return "broken_tool_call"
        if call["name"] not in known:
            return "unknown_tool"
    return None
