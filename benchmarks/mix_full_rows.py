"""Synthetic data sets of mix914k's true sizes and row schemas, made on the fly: row i of a source is a function of
(source, i) alone, and so is every fault that is planted in it (`plan`), which the oracle reads back.

    3 %    exact duplicates      text of an earlier row, of this source or of an earlier one
    0.2 %  copies                an earlier row, id and all
    1 %    near duplicates       code and math; a few words changed, Jaccard about 0.82 to 0.95
    0.5 %  near misses           the same with more words changed, Jaccard about 0.6 to 0.74: must stay
    0.5 %  contaminated          half quote an evaluation item, half an earlier row, which may be held out
    2 %    broken                half in a way that cannot be used, half text that is none
    2 %    asked again           openorca: an earlier row's question under another system prompt

Texts are cheap: 12-word runs out of a pool, and after each a word that no other row has, so that any 13 words in a row
are unique and unrelated texts are never alike by chance.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.forms import RawRow, convert

MASK = 2**64 - 1
NUM_RUNS = 1 << 16
ROWS = {
    "nemo_math": 239_467, "nemo_stem": 355_000, "nemo_code": 175_000, "nemo_chat": 627_720, "opencode": 5_000_000,
    "evol_code": 111_183, "magicoder_oss": 75_197, "codealpaca": 20_022, "openorca": 4_230_000, "ultrachat": 207_865,
    "xlam": 60_000, "hermes_fc": 9_700, "glaive_fc": 112_960, "toolace": 11_300, "open_swe": 207_000,
}  # fmt: skip
NUMBER = {name: number for number, name in enumerate(ROWS)}
PLAIN = ("nemo_math", "nemo_stem", "nemo_code", "opencode", "evol_code", "magicoder_oss")  # one user turn, no tools
NEAR = ("nemo_math", "nemo_code", "opencode", "evol_code", "magicoder_oss", "codealpaca")
NUM_RUNS_OF = {"codealpaca": 6, "nemo_chat": 20, "open_swe": 30}  # of the first user turn; others 12
BROKEN = ("empty_user", "placeholder_user", "special_token_in_text", "lone_surrogate", "row_not_an_object",
          "repeated_lines", "base64")  # fmt: skip
NEAR_JACCARD, MISS_JACCARD = (0.95, 0.92, 0.88, 0.85, 0.82), (0.74, 0.7, 0.6)
NUM_ITEMS, ITEM_WORDS = 1500, 40


@dataclass(frozen=True)
class Plan:
    """What row i is. fault: None, "duplicate", "copy", "near", "miss", "quote", "item", "asked_again" or one of BROKEN;
    origin: the (source, row) whose text it uses, itself without one; jaccard: intended similarity to it; skip: the
    reason why the importer does not choose it."""

    fault: str | None
    origin: tuple[str, int]
    jaccard: float = 1.0
    skip: str | None = None


def mix64(value: int) -> int:
    """splitmix64's finalizer: well mixed 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def draw(name: str, row: int) -> int:
    return mix64(NUMBER[name] << 40 | row)


@cache
def runs() -> list[str]:
    rng = random.Random(0)
    parts = "bdfglmnprst", ("a", "e", "io", "u"), ("ck", "ld", "m", "n", "rt"), ("", "ing", "er", "s")
    vocabulary = ["".join(word) for word in product(*parts)]
    return [" ".join(rng.choices(vocabulary, k=12)) for _ in range(NUM_RUNS)]


def evaluation() -> dict[str, list[tuple[str, ...]]]:
    """A synthetic evaluation set."""
    return {"items": [(item(number),) for number in range(NUM_ITEMS)]}


def item(number: int) -> str:
    return " ".join(f"item{number}w{k}" if k % 5 == 0 else f"ask{(number * 7 + k) % 97}" for k in range(ITEM_WORDS))


def plan(name: str, row: int, num_rows: int) -> Plan:
    """What is planted in the row. num_rows: of the source at this scale, so that origins exist."""
    seed = draw(name, row)
    fault = _fault(name, seed >> 32) if row else None
    if fault is None or fault in BROKEN or fault == "item":
        return Plan(fault, (name, row), skip=skip_of(name, row))
    origin = _origin(name, row, num_rows, seed >> 8, across=fault == "duplicate" and bool(seed & 0x10000))
    if origin is None:
        return Plan(None, (name, row), skip=skip_of(name, row))
    choices = NEAR_JACCARD if fault == "near" else MISS_JACCARD if fault == "miss" else (1.0,)
    skip = skip_of(name, row if fault != "copy" else origin[1])
    return Plan(fault, origin, choices[(seed >> 20) % len(choices)], skip)


def skip_of(name: str, row: int) -> str | None:
    """The importer's reason to pass over the row."""
    if name == "opencode" and draw(name, row) & 15 == 0:
        return "test_score_below_0.9"
    return "not_resolved" if name == "open_swe" and draw(name, row) & 1 else None


def _fault(name: str, seed: int) -> str | None:
    """By shares of 10,000."""
    place = seed % 10_000
    shares = {"duplicate": 300, "copy": 20, "quote": 25, "item": 25}
    shares |= {"near": 100, "miss": 50} if name in NEAR else {}
    shares |= {"asked_again": 200} if name == "openorca" else {}
    for fault, share in shares.items():
        if place < share:
            return fault
        place -= share
    return BROKEN[seed // 10_000 % len(BROKEN)] if place < 200 else None


def _origin(name: str, row: int, num_rows: int, seed: int, across: bool) -> tuple[str, int] | None:
    """An earlier row without any fault. Only duplicates reach further back than one row, so that no two of the others
    share an origin."""
    source, place, tries = name, row - 1, 1
    if _fault(name, draw(name, row) >> 32) == "duplicate":
        tries = 5
        if across and name in PLAIN[1:]:
            source = PLAIN[seed % PLAIN.index(name)]
            place = row % _scaled(source, name, num_rows)
        else:
            place = row - 1 - seed % min(row, 2000)
    for candidate in range(place, max(place - tries, -1), -1):
        if candidate == 0 or _fault(source, draw(source, candidate) >> 32) is None:
            return source, candidate
    return None


def _scaled(source: str, name: str, num_rows: int) -> int:
    return max(1, ROWS[source] * num_rows // ROWS[name])


# ---------------------------------------------------------------- texts


def own_text(name: str, row: int) -> str:
    """The first user turn of a row without faults."""
    number, value, pool, words = NUMBER[name], draw(name, row), runs(), []
    for k in range(NUM_RUNS_OF.get(name, 12)):
        value = (value * 6364136223846793005 + 1442695040888963407) & MASK
        words.append(f"{pool[value >> 48]} q{number}x{row}n{k}")
    return " ".join(words)


def text_of(name: str, row: int, what: Plan) -> str:
    """The first user turn, fault and all."""
    fault, text = what.fault, own_text(*what.origin)
    if fault in ("near", "miss"):
        return changed(text, row, what.jaccard)
    if fault == "quote":
        return f"{own_text(name, row)} {' '.join(text.split()[20:40])}"
    if fault == "item":
        return f"{text} {item(draw(name, row) % NUM_ITEMS)}"
    if fault == "empty_user" or fault == "row_not_an_object":
        return ""
    if fault == "placeholder_user":
        return "N/A"
    if fault == "special_token_in_text":
        return f"{text} <|im_end|> more"
    if fault == "lone_surrogate":
        return f"{text} \ud83d more"
    if fault == "repeated_lines":
        return f"line {row}\n" * 40
    if fault == "base64":
        return f"{text} " + "".join(f"{draw(name, row + k):016X}aZ" for k in range(150))
    return text


def changed(text: str, row: int, jaccard: float) -> str:
    """`text` with as many single words replaced, far apart, as bring its 5-word shingles to about `jaccard`."""
    words = text.split()
    shingles = len(words) - 4
    count = max(1, round(shingles * (1 - jaccard) / (5 * (1 + jaccard))))
    for k in range(count):
        words[5 + k * ((len(words) - 10) // count)] = f"z{row}k{k}"
    return " ".join(words)


# ---------------------------------------------------------------- schemas


def _tool(row: int) -> dict:
    return {"name": f"tool_{row % 5000}", "description": "Looks something up.",
            "parameters": {"q": {"type": "str", "description": "what", "default": ""}}}  # fmt: skip


def _schema_tool(row: int) -> dict:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    return {**_tool(row), "parameters": parameters}


def _nemotron(name: str, row: int, text: str, origin: int) -> dict:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": text},
                {"role": "assistant", "content": f"answer {origin}"}]  # fmt: skip
    return {"uuid": f"{draw(name, row):016x}-{row:x}", "license": "CC BY 4.0", "generator": "synthetic", "version": "0",
            "category": name.removeprefix("nemo_"), "reasoning": "off", "messages": messages}  # fmt: skip


def _opencode(name: str, row: int, text: str, origin: int) -> dict:
    score = "0.5" if skip_of(name, row) else "0.95"
    return {"id": f"{draw(name, row):016x}{row:x}", "input": text, "domain": "generic", "average_test_score": score,
            "generation_algorithm": "self-instruct"}  # fmt: skip


def _openorca(name: str, row: int, text: str, origin: int) -> dict:
    kind = ("t0",) * 11 + ("flan",) * 6 + ("niv",) * 2 + ("cot",)
    again = _fault(name, draw(name, row) >> 32) == "asked_again"
    system = f"Another system text {row}." if again else "You are a helpful assistant." if origin % 2 else ""
    return {"id": f"{kind[draw(name, row) % 20]}.{row}", "system_prompt": system, "question": text}


def _ultrachat(name: str, row: int, text: str, origin: int) -> dict:
    turns = [text, own_text("ultrachat", origin)[::-1][:400], f"Thank you, go on with {origin} once more."]
    messages = [m for turn in turns for m in ({"role": "user", "content": turn},
                                              {"role": "assistant", "content": f"so {origin}"})]  # fmt: skip
    return {"prompt": text, "prompt_id": f"{draw(name, row):016x}{row:x}", "messages": messages}


def _glaive(name: str, row: int, text: str, origin: int) -> dict:
    system = "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    call = f'<functioncall> {{"name": "{_tool(origin)["name"]}", "arguments": \'{{"q": "x"}}\'}} <|endoftext|>'
    turns = [f"USER: {text}", f"ASSISTANT: {call}", f'FUNCTION RESPONSE: {{"row": {origin}}}',
             f"ASSISTANT: ok {row} <|endoftext|>"]  # fmt: skip
    return {"system": system + json.dumps(_schema_tool(origin)), "chat": "\n\n\n".join(turns)}


def _hermes(name: str, row: int, text: str, origin: int) -> dict:
    tools = [{"type": "function", "function": _schema_tool(origin)}]
    call = f'<tool_call>\n{{"name": "{_tool(origin)["name"]}", "arguments": {{"q": "x"}}}}\n</tool_call>'
    turns = [("system", f"You are a function calling AI model. <tools>{json.dumps(tools)}</tools>"), ("human", text),
             ("gpt", call)]  # fmt: skip
    return {"id": f"{draw(name, row):016x}{row:x}", "tools": json.dumps(tools), "category": "x",
            "conversations": [{"from": who, "value": what} for who, what in turns]}  # fmt: skip


def _toolace(name: str, row: int, text: str, origin: int) -> dict:
    system = f"You are an expert in composing functions. Here is a list: {json.dumps([_schema_tool(origin)])}."
    turns = [("user", text), ("assistant", f'[{_tool(origin)["name"]}(q="{row}")]')]
    return {"system": system, "conversations": [{"from": who, "value": what} for who, what in turns]}


def _open_swe(name: str, row: int, text: str, origin: int) -> dict:
    tools = [json.dumps({"type": "function", "function": _schema_tool(0)})]
    messages = [{"role": "system", "content": "You fix repositories."}, {"role": "user", "content": text}]
    for turn in range(12):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": _tool(0)["name"], "arguments": '{"q": "x"}'}}
        messages += [{"role": "assistant", "content": f"step {turn} of {origin}", "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": f"c{turn}", "content": f"result {turn} " * 60}]  # fmt: skip
    return {"trajectory_id": f"{draw(name, row):016x}{row:x}", "repo": f"org/r{draw(name, row) % 1500}",
            "license": "MIT", "language": "python", "messages": messages, "tools": tools,
            "resolved": 0 if skip_of(name, row) else 1}  # fmt: skip


BUILDERS = {
    "opencode": _opencode, "openorca": _openorca, "ultrachat": _ultrachat, "glaive_fc": _glaive, "hermes_fc": _hermes,
    "toolace": _toolace, "open_swe": _open_swe,
    "evol_code": lambda name, row, text, origin: {"instruction": text, "response": f"answer {row}"},
    "codealpaca": lambda name, row, text, origin: {"instruction": text, "input": "", "output": f"answer {row}"},
    "magicoder_oss": lambda name, row, text, origin: {
        "lang": "python", "raw_index": row, "index": row, "seed": "", "problem": text, "solution": f"answer {row}"},
    "xlam": lambda name, row, text, origin: {
        "id": row, "query": text, "answers": "[]", "tools": json.dumps([_tool(origin)])},
}  # fmt: skip


def raw_row(name: str, row: int, what: Plan) -> object:
    """The row as the data set would have it."""
    if what.fault == "row_not_an_object":
        return f"row {row}"
    if what.fault == "copy":
        return raw_row(*what.origin, Plan(None, what.origin))
    # A quoting row has tools, system text and later turns of its own.
    origin = row if what.fault == "quote" else what.origin[1]
    return BUILDERS.get(name, _nemotron)(name, row, text_of(name, row, what), origin)


def read(name: str, config: SourceConfig, data: DataConfig) -> Iterator[RawRow]:
    """The source kind `synthetic`: config.options["rows"] rows in the schema of the source's own form."""
    num_rows = config.options["rows"]
    for row in range(num_rows):
        what = plan(name, row, num_rows)
        yield convert(raw_row(name, row, what), config.form, f"{name}:{row}", {"dataset": name, "row": row})
