"""KNOWN_FAILURES.md lists every known way this job goes wrong and the tests that hold it; here it meets those tests.

A test that holds a line says so in its docstring's first line: "Trap 17: ..." or "Traps 17, 18: ...".
`python tests/test_known_failures.py` rewrites the list's last column.
"""

import ast
import re
from pathlib import Path

LIST = Path(__file__).with_name("KNOWN_FAILURES.md")
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.*?) \|$")
NUM_TRAPS = 44


def holders_by_trap() -> dict[int, list[str]]:
    """Trap number -> the tests whose docstring names it, as file::name."""
    found: dict[int, list[str]] = {}
    for path in sorted(LIST.parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            match = re.match(r"\s*Traps? ((?:\d+(?:, | and )?)+)", ast.get_docstring(node) or "")
            for number in re.findall(r"\d+", match[1]) if match else []:
                found.setdefault(int(number), []).append(f"{path.relative_to(LIST.parent)}::{node.name}")
    return found


def listed() -> dict[int, tuple[str, str]]:
    rows = [ROW.match(line) for line in LIST.read_text("utf-8").splitlines()]
    return {int(row[1]): (row[2], row[3]) for row in rows if row}


def held_by(number: int, tests: dict[int, list[str]], planned: str) -> str:
    """The last column: tests that exist, and after 'planned:' what is still to come."""
    still = re.search(r"planned: .*", planned)
    return "; ".join([*(f"`{name}`" for name in tests.get(number, [])), *([still[0]] if still else [])])


def test_every_known_failure_is_listed_once():
    assert sorted(listed()) == list(range(1, NUM_TRAPS + 1))


def test_every_known_failure_names_tests_that_exist_or_what_is_planned():
    tests = holders_by_trap()
    for number, (_, held) in listed().items():
        assert held == held_by(number, tests, held), f"line {number} is out of date: run python {__file__}"
        assert held, f"line {number} is held by nothing and plans nothing"


if __name__ == "__main__":
    tests, lines = holders_by_trap(), []
    for line in LIST.read_text("utf-8").splitlines():
        row = ROW.match(line)
        lines.append(f"| {row[1]} | {row[2]} | {held_by(int(row[1]), tests, row[3])} |" if row else line)
    LIST.write_text("\n".join(lines) + "\n", "utf-8")
