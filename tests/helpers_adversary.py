"""One seeded mutator that makes an adversarial file out of good rows: every value in every place, every broken line."""

import json
import random
from collections.abc import Iterator

MISSING = object()
_NEST = lambda depth, open_, close: open_ * depth + close * depth

# What stands where something else was expected.
SMALL_VALUES: list = [
    MISSING, None, 0, -1, 3.5, True, False, "", " ", "\n", "-", "N/A", "<noinput>", "null", "None", "1e999", "NaN",
    "[]", "{}", [], {},
    [[]], [None], [{}], {"": ""}, ["a", 1, None], {"text": 5}, {"role": "user"}, {"a": {"b": [1, {"c": "d"}]}},
    [{"type": "text", "text": "part"}], [{"type": "image_url", "image_url": {"url": "x"}}], [{"from": "human"}],
    [{"role": "user", "content": "put in"}], [{"from": "human", "value": "put in"}], [["role", "user"]],
    "\ud83d", "ok \ude00 not ok", "\x00", "nul \x00 inside", "\u200b\ufeff", "crlf\r\nline\rline", "\ufffd" * 9,
    "<|im_end|>", "text <|endoftext|> text", "</s>", "[INST] x [/INST]", "<｜User｜>", "<think>", "a</think>b</think>",
    "<think><think>x</think>", "<tool_call>", "<tool_call>{}</tool_call>", "<tool_response>", "<functioncall> {",
    "<tools>",
    "</tools><tools>", "[f(", "[f(a=1)]", "[(=)]", '{"a": ', '[{"name": "f"}', "[{'name': 'f', 'parameters': None}]",
    "[{'name': 'f'}, ", '{"name": "f", "arguments": \'{', "{'a': b'bytes'}", "{'a': {1, 2}}", "{[]: 1}", "{(1, 2): 3}",
    "...", "1 + 1", "lambda: 0", "__import__('os')", '"a json string"', "[NaN, Infinity]", '{"a": 1, "a": 2}',
    "1" * 5000,
    "USER:", "USER: a\n\n\nASSISTANT:", "ASSISTANT: <functioncall>", "SYSTEM:", "List[", "str, optional", ", optional",
    "/no_think", "detailed thinking on", "{" , "}", "'", '"', "\\", "\\u12",
    "<div><p><b><i><u></u></i></b></p></div>" * 3,
]  # fmt: skip
# Where a careless pattern or a recursive walk would hang or die.
LARGE_VALUES: list = [
    "x" * 100_000, " " * 100_000 + "x", "a " * 50_000, "\n" * 100_000 + "x", "[" * 100_000, "<a " * 33_000,
    "<|" * 50_000,
    "\\" * 99_999, "'" * 100_000, "\n\nUSER:" * 12_500, "[{" * 50_000, "<tools>" * 14_000, "<think>" * 14_000,
    "(" * 100_000,
    _NEST(2000, "[", "]"), _NEST(2000, '{"a":', "}").replace('"a":}', '"a":0}'), _NEST(500, "[", "]"),
    _NEST(80, "[", "]"),
    "[f(a=" + "[" * 50_000, "[f(" + "a=1, " * 20_000, "List[" * 20_000, "-" * 100_000, "1+" * 30_000 + "1",
    "<tool_call>" * 9_000,
    '"arguments": ' * 8_000 + "'", "/think " * 14_000, "é" * 100_000,
]  # fmt: skip


def nested(depth: int) -> list:
    value: object = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return [value]


NESTED_VALUES = [nested(80), nested(300)]  # deeper ones are no row that Python's JSON decodes; see `broken_lines`


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything inside a row, its embedded JSON texts included (a path goes through those as if decoded)."""
    if path:
        yield path
    value = _decoded(value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def _decoded(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def replaced(value: object, path: tuple, new: object) -> object:
    """A copy of the row with `new` at `path`."""
    if not path:
        return new
    inside = _decoded(value)
    copy = dict(inside) if isinstance(inside, dict) else list(inside)
    item = replaced(copy[path[0]], path[1:], new)
    if item is MISSING:
        del copy[path[0]]
    else:
        copy[path[0]] = item
    return json.dumps(copy) if isinstance(value, str) else copy


def mutated_rows(rows: list[dict], seed: int, num_nested: int) -> Iterator[dict]:
    """Each top-level field of the first row with each value, and as many random places of random rows."""
    rng = random.Random(seed)
    for key in rows[0]:
        for value in (*SMALL_VALUES, *NESTED_VALUES):
            yield replaced(rows[0], (key,), value)
    deep = [(row, path) for row in rows for path in places(row)]
    for _ in range(num_nested):
        row, path = rng.choice(deep)
        yield replaced(row, path, rng.choice(SMALL_VALUES if rng.random() < 0.97 else NESTED_VALUES))
    for value in LARGE_VALUES:
        row, path = rng.choice(deep)
        yield replaced(row, path, value)
        yield replaced(row, path[:1], value)


def broken_lines(rows: list[dict], seed: int, count: int = 40) -> Iterator[bytes]:
    """Lines that are no rows, or are rows only by luck."""
    rng = random.Random(seed)
    for _ in range(count):
        text = json.dumps(rng.choice(rows), ensure_ascii=rng.random() < 0.5)
        cut = rng.randrange(1, len(text))
        key = json.dumps(rng.choice(list(rows[0])))
        yield from (
            text[:cut].encode("utf-8", "surrogatepass"),
            text[cut:].encode("utf-8", "surrogatepass"),
            f"{{{key}: 1, {key}: [], {text[1:]}".encode("utf-8", "surrogatepass"),  # the last of equal keys counts
            f"{text[:-1]}, {key}: null}}".encode("utf-8", "surrogatepass"),
            text.replace('"', "'").encode("utf-8", "surrogatepass"),
        )
    text = json.dumps(rows[0], ensure_ascii=False)
    key = json.dumps(next(iter(rows[0])))
    for value in (
        _NEST(2000, "[", "]"),
        _NEST(100_000, "[", "]"),
        "[" * 100_000,
        "1" * 5000,
        "NaN",
        "-Infinity",
        "1e999",
    ):
        yield f"{text[:-1]}, {key}: {value}}}".encode()
    yield repr(rows[0]).encode("utf-8", "surrogatepass")
    yield from (b"[]", b'"text"', b"17", b"null", b"true", b"{}", b"{", b"\x00\x01\x02", b"\xff\xfe{", b"x" * 100_000)
    yield text.encode("utf-8").replace(b" ", b" \xe9", 1)  # a Latin-1 byte
    yield text.encode("utf-8").replace(b" ", b" \x00", 1)  # a raw NUL inside a string, or between two values
