"""Real prompts that ship inside PyPI wheels and the Python standard library, for a mix with no hub and no account.

    evals        OpenAI Evals' registry: task prompts with system and few-shot turns      MIT
    stdlib_code  this Python's own functions: signature and docstring, "write the body"   PSF-2.0
    pydoc        the language reference's topics, "explain ..."                           PSF-2.0
    bfcl         Berkeley function-calling questions with their tool schemas              Apache-2.0
    chatterbot   small talk, several turns                                                BSD

Wheels are pinned by version. The standard library is whatever runs: Python 3.11 and 3.12 differ in some functions and
topics, so the rows of stdlib_code and pydoc differ between them too (the manifest records the version).
"""

import ast
import heapq
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.forms import RawRow, row_id
from dflash_train.data.schemas import clean_tools
from dflash_train.data.text import Drop, Skip
from dflash_train.util.errors import UserError
from dflash_train.util.packages import fetch_wheel
from dflash_train.util.provenance import digest, stable_hash


@dataclass
class WheelOptions:
    """The wheel a source lies in."""

    package: str = ""
    version: str = ""


@dataclass
class EvalsOptions(WheelOptions):
    """per_folder rows of each task folder (lowest hash first), out of its files' first lines_per_file lines.

    exclude: folders whose text has another licence than the package (its LICENSE.md), or a LICENSE of their own.
    """

    package: str = "evals"
    version: str = "3.0.1.post1"
    per_folder: int = 10
    lines_per_file: int = 500
    min_chars: int = 20
    max_chars: int = 2000
    min_ascii_share: float = 0.9
    exclude: list[str] = field(default_factory=lambda: [
        "already_said_that", "ballots", "japanese_driving_license", "sandbagging", "schelling_point", "steganography",
        "text_compression", "theory_of_mind"])  # fmt: skip


@dataclass
class StdlibOptions:
    """Length bounds of the docstring and of the whole prompt, in characters."""

    min_doc_chars: int = 40
    max_chars: int = 2000


@dataclass
class PydocOptions:
    pass


@dataclass
class BfclOptions(WheelOptions):
    """train_share of the ids by hash; the others stay free for measuring."""

    package: str = "bfcl-eval"
    version: str = "2026.3.23"
    files: list[str] = field(default_factory=lambda: ["simple_python", "multiple", "parallel", "live_simple"])
    train_share: float = 0.7


@dataclass
class ChatterbotOptions(WheelOptions):
    package: str = "chatterbot-corpus"
    version: str = "1.3.3"
    language: str = "english"


OPTIONS = {"evals": EvalsOptions, "stdlib_code": StdlibOptions, "pydoc": PydocOptions, "bfcl": BfclOptions,
           "chatterbot": ChatterbotOptions}  # fmt: skip


def read(name: str, config: SourceConfig, data: DataConfig) -> Iterator[RawRow]:
    """Every row of the package's source. Raises UserError when the wheel cannot be had."""
    options = OPTIONS[config.kind](**config.options)
    yield from READERS[config.kind](options, data.seed)


def _existing(folder: Path, options: WheelOptions) -> Path:
    if not folder.exists():
        raise UserError(f"package {options.package}=={options.version}", got=f"no {folder.name} in it",
                        want="a version that has it", fix="leave options.version at its default")  # fmt: skip
    return folder


# ---------------------------------------------------------------- evals


def _evals(options: EvalsOptions, seed: int) -> Iterator[RawRow]:
    root = fetch_wheel(options.package, options.version) / "evals" / "registry" / "data"
    for folder in sorted(p for p in _existing(root, options).iterdir() if p.is_dir()):
        if folder.name in options.exclude or any(folder.rglob("LICENSE*")):
            continue
        best: list[tuple[int, str, RawRow]] = []  # max-heap by negated hash: the per_folder lowest stay
        seen: set[str] = set()
        for row in _evals_folder(folder, root, options):
            if row.id in seen:
                row.skip = "duplicate_in_folder"
            if row.drop or row.skip:
                yield row
                continue
            seen.add(row.id)
            heapq.heappush(best, (-stable_hash(seed, "folder cap", row.id), row.id, row))
            if len(best) > options.per_folder:
                row = heapq.heappop(best)[2]
                row.skip = "over_folder_cap"
                yield row
        yield from (row for _, _, row in sorted(best, key=lambda item: -item[0]))


def _evals_folder(folder: Path, root: Path, options: EvalsOptions) -> Iterator[RawRow]:
    for path in sorted(folder.rglob("*.jsonl")):
        relative = path.relative_to(root).as_posix()
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                if number > options.lines_per_file:
                    break
                location = f"{relative}:{number}"
                upstream = {"dataset": options.package, "config": folder.name, "row": f"{relative}:{number}"}
                try:
                    yield _evals_row(json.loads(line), location, upstream, options)
                except Skip as skip:
                    yield RawRow(location, skip=skip.reason)
                except ValueError:
                    yield RawRow(location, drop="bad_json")


def _evals_row(row: object, location: str, upstream: dict, options: EvalsOptions) -> RawRow:
    turns = row.get("input") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns:
        raise Skip("not_a_chat_prompt")
    messages = [_evals_message(turn) for turn in turns]
    text = "\n".join(message["content"] for message in messages)
    if not options.min_chars <= len(text) <= options.max_chars:
        raise Skip("length_outside_bounds")
    if len(text.encode("ascii", "ignore")) < options.min_ascii_share * len(text):
        raise Skip("too_little_ascii")
    if all(message["role"] == "system" for message in messages):  # the task itself was filed as a system message
        messages = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
    return RawRow(location, digest(messages, 20), messages, upstream=upstream)


def _evals_message(turn: object) -> dict:
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
        raise Skip("not_a_chat_prompt")
    # Few-shot examples are system messages with these names, after OpenAI's old convention.
    role = {"example_user": "user", "example_assistant": "assistant"}.get(turn.get("name"), turn.get("role"))
    return {"role": role, "content": turn["content"]}


# ---------------------------------------------------------------- the standard library


STDLIB_ASKS = (
    "Write the body of this Python function.",
    "Complete this Python function so that it does what its docstring says.",
    "Implement the following Python function.",
)


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_code(options: StdlibOptions, seed: int) -> Iterator[RawRow]:
    root = stdlib_folder()
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skip & set(relative.parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in old modules
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            yield RawRow(relative.as_posix(), drop="unparsable_file")
            continue
        yield from _functions_of(tree, relative.as_posix(), options)


def _functions_of(tree: ast.Module, module: str, options: StdlibOptions) -> Iterator[RawRow]:
    """Top-level functions and methods with a docstring. All of a file share one group, so hold-out never splits a
    file."""
    owners = [(None, tree), *((node.name, node) for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner, parent in owners:
        for node in parent.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            location = f"{module}:{node.lineno}"
            doc = ast.get_docstring(node)
            if not doc:
                yield RawRow(location, skip="no_docstring")
                continue
            if len(doc) < options.min_doc_chars:
                yield RawRow(location, skip="short_docstring")
                continue
            name = f"{owner}.{node.name}" if owner else node.name
            head = ast.unparse(_signature(node))
            place = f"It is a method of the class `{owner}` in" if owner else "It belongs to"
            ask = STDLIB_ASKS[stable_hash("ask", module, name) % len(STDLIB_ASKS)]
            text = f"{ask} {place} the module `{_module_name(module)}`.\n\n```python\n{head}\n```"
            if len(text) > options.max_chars:
                yield RawRow(location, skip="length_outside_bounds")
                continue
            yield RawRow(location, f"{module}:{name}", [{"role": "user", "content": text}], group=module,
                         upstream={"dataset": "python", "row": f"{module}:{name}"})  # fmt: skip


def _module_name(module: str) -> str:
    return module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """The function with its docstring as its only body."""
    return type(node)(**{**{name: getattr(node, name) for name in node._fields}, "body": node.body[:1]},
                      lineno=node.lineno, col_offset=node.col_offset)  # fmt: skip


def _pydoc(options: PydocOptions, seed: int) -> Iterator[RawRow]:
    from pydoc_data.topics import topics

    for key in sorted(topics):
        title = next((line.strip() for line in topics[key].splitlines() if line.strip()), key)
        text = f"Explain this topic of the Python language reference, with short examples: {title} (`{key}`)."
        yield RawRow(f"pydoc topic {key}", key, [{"role": "user", "content": text}],
                     upstream={"dataset": "python", "config": "pydoc_data.topics", "row": key})  # fmt: skip


# ---------------------------------------------------------------- tools, small talk


def _bfcl(options: BfclOptions, seed: int) -> Iterator[RawRow]:
    root = fetch_wheel(options.package, options.version) / "bfcl_eval" / "data"
    for name in options.files:
        path = _existing(root / f"BFCL_v4_{name}.json", options)
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                location = f"{path.name}:{number}"
                try:
                    row = json.loads(line)
                    # Not the recipe's seed: what is kept for measuring must not move with it.
                    if stable_hash("bfcl", row["id"]) / 2**64 >= options.train_share:
                        yield RawRow(location, skip="kept_for_evaluation")
                        continue
                    yield RawRow(location, str(row["id"]), row["question"][0], clean_tools(row["function"]),
                                 {"dataset": options.package, "config": name, "row": str(row["id"])})  # fmt: skip
                except Drop as drop:
                    yield RawRow(location, drop=drop.reason)
                except (ValueError, KeyError, IndexError, TypeError):
                    yield RawRow(location, drop="unknown_form")


def _chatterbot(options: ChatterbotOptions, seed: int) -> Iterator[RawRow]:
    import yaml

    root = fetch_wheel(options.package, options.version) / "chatterbot_corpus" / "data" / options.language
    for path in sorted(_existing(root, options).glob("*.yml")):
        conversations = yaml.safe_load(path.read_text("utf-8"))["conversations"]
        for number, turns in enumerate(conversations, 1):
            location = f"{path.name}:conversation {number}"
            if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
                yield RawRow(location, drop="content_not_text")
                continue
            roles = ("user", "assistant")
            messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
            yield RawRow(location, row_id({"turns": turns}), messages,
                         upstream={"dataset": options.package, "config": path.stem, "row": number})  # fmt: skip


READERS: dict[str, Callable[..., Iterator[RawRow]]] = {
    "evals": _evals, "stdlib_code": _stdlib_code, "pydoc": _pydoc, "bfcl": _bfcl, "chatterbot": _chatterbot,
}  # fmt: skip
