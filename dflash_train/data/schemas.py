"""Tools and tool calls, whatever they were stored as, in the one form that chat templates read.

tools       [{type: function, function: {name, description, parameters: JSON Schema}}]
tool calls  [{id, type: function, function: {name, arguments: mapping}}]
"""

import re

from dflash_train.data.text import Drop, clean_text, clean_value, parse_json, parse_literal

# Spellings of types in other languages' schemas (lower case) -> JSON Schema's seven; "any" and what is not here: no
# type, which allows all.
_JSON_TYPES = {
    "string": "string", "str": "string", "text": "string", "char": "string",
    "integer": "integer", "int": "integer", "long": "integer", "short": "integer", "byte": "integer",
    "bigint": "integer",
    "number": "number", "float": "number", "double": "number", "complex": "number",
    "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "tuple": "array", "set": "array", "arraylist": "array", "sequence": "array",
    "iterable": "array",
    "object": "object", "dict": "object", "dictionary": "object", "map": "object", "mapping": "object",
    "hashmap": "object", "hashtable": "object", "json": "object",
    "null": "null", "none": "null", "nonetype": "null",
}  # fmt: skip
_VALUES = ("default", "enum", "const", "example", "examples")  # schema keys that hold values, not schemas
_PYTHON_TYPE = re.compile(r"\s*(?:typing\.)?([A-Za-z]+)\s*(?:\[(.*)\]\s*)?", re.DOTALL)
_MAX_TYPE_CHARS = 200


def json_type(name: str) -> str | None:
    """JSON Schema's name of a type, None where any value goes."""
    return _JSON_TYPES.get(name.strip().lower())


def python_type(text: str) -> dict:
    """A Python annotation -> a schema: List[int] -> an array of integers, Optional and Union -> what they hold, {} for
    what JSON Schema has no word for."""
    found = _PYTHON_TYPE.fullmatch(text) if len(text) <= _MAX_TYPE_CHARS else None
    if not found:
        return {}
    name, inner = found[1].lower(), _split_types(found[2] or "")
    if name in ("optional", "union"):
        schemas = [schema for schema in map(python_type, inner) if schema.get("type") != "null"]
        same = bool(schemas) and all(schema == schemas[0] for schema in schemas)
        return schemas[0] if same else {"anyOf": schemas} if schemas and all(schemas) else {}
    kind = json_type(name)
    if kind is None:
        return {}
    items = python_type(inner[0]) if kind == "array" and inner else {}
    if name == "tuple" and any(python_type(part) != items for part in inner):
        items = {}
    return {"type": kind, "items": items} if items else {"type": kind}


def _split_types(text: str) -> list[str]:
    """The parts between top-level commas."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def json_schema(schema: object) -> object:
    """A parameter schema with JSON Schema's own type names. Raises RecursionError where it nests too deep."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "type" and not isinstance(value, dict):
            value = _type_names(value)
        elif key == "properties" and isinstance(value, dict):  # its keys are parameter names, 'type' among them
            value = {name: json_schema(item) for name, item in value.items()}
        elif key == "required":  # a list of names; some sets write a flag, or null
            value = value if isinstance(value, list) and all(isinstance(name, str) for name in value) else None
        elif key not in _VALUES:
            value = json_schema(value)
        if value is not None or key in _VALUES:
            out[key] = value
    return out


def _type_names(value: object) -> str | list | None:
    if isinstance(value, str):
        return json_type(value)
    if not isinstance(value, list):
        return None
    names = [json_type(name) if isinstance(name, str) else None for name in value]
    return None if None in names else list(dict.fromkeys(names)) or None


def clean_tools(tools: object) -> list[dict] | None:
    """Any spelling of a tool list -> functions with JSON Schema parameters, None for no tools. Raises Drop."""
    if isinstance(tools, str):
        tools = parse_literal(tools, "bad_tools") if tools.strip() else None
    if tools is None or tools == [] or tools == {}:
        return None
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list):
        raise Drop("bad_tools")
    return [_clean_tool(parse_literal(tool, "bad_tools") if isinstance(tool, str) else tool) for tool in tools]


def _clean_tool(tool: object) -> dict:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = _name(function, "bad_tools")
    parameters = function.get("parameters")
    parameters = parse_literal(parameters, "bad_tools") if isinstance(parameters, str) and parameters else parameters
    if not isinstance(parameters or {}, dict):
        raise Drop("bad_tools")
    description = function.get("description")
    return {"type": "function", "function": clean_value({
        "name": name, "description": description if isinstance(description, str) else "",
        "parameters": json_schema(parameters or {"type": "object", "properties": {}})})}  # fmt: skip


def clean_tool_calls(calls: object, prefix: str = "call") -> list[dict]:
    """Any spelling of tool calls -> calls whose arguments are mappings; one without an id gets prefix_0, prefix_1 ...
    Raises Drop."""
    if isinstance(calls, str):
        calls = parse_literal(calls, "bad_tool_call")
    if not isinstance(calls, list):
        raise Drop("bad_tool_call")
    out = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = _name(function, "bad_tool_call")
        arguments = _clean_arguments(function.get("arguments"))
        out.append({"id": clean_id(call.get("id")) or f"{prefix}_{number}", "type": "function",
                    "function": {"name": name, "arguments": arguments}})  # fmt: skip
    return out


def _name(function: object, reason: str) -> str:
    """The name of a tool or of a called one. Raises Drop(reason) where nothing is left of it."""
    name = function.get("name") if isinstance(function, dict) else None
    name = clean_text(name).strip() if isinstance(name, str) else ""
    if not name:
        raise Drop(reason)
    return name


def clean_id(value: object) -> str:
    """An id as text, "" for what is none."""
    return clean_text(str(value)).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _clean_arguments(arguments: object) -> dict:
    if isinstance(arguments, str):
        arguments = parse_json(arguments, "bad_tool_arguments") if arguments.strip() else {}
    if not isinstance({} if arguments is None else arguments, dict):
        raise Drop("bad_tool_arguments")
    return clean_value(arguments or {})
