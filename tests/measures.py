"""How large the package is, and how often it says the same: `python -m tests.measures` prints a table.

`budget.toml` has the most lines of each room, which the lints compare. Whoever needs more raises the number in the same
change, and says why.
"""

import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.pages import PACKAGE

BUDGET = Path(__file__).with_name("budget.toml")

SHELL = ("trainers", "rollout", "weight_sync", "serve", "ray", "generators", "policy", "chat_api")
"""Rooms around the core, which run what it computes."""

SHELL_FILES = ("generator_messages.py",)

SHORT, ALIKE = 60, 6
"""Lines below which a file is short, and lines that two places share at least to count as a pair."""

MESSAGES = ("generator_messages.py", "generators/joining_messages.py", "policy/crew.py", "serve/messages.py")
"""Files whose dataclasses travel between processes to ask for something or to answer."""


def sources() -> dict[Path, str]:
    """The text of every file of the package."""
    return {file.relative_to(PACKAGE): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}


def room_of(file: Path) -> str:
    """The folder of a file; "." for those beside the rooms."""
    return file.parts[0] if file.parts[1:] else "."


def lines_of_rooms() -> dict[str, int]:
    """Lines of every room."""
    lines: Counter[str] = Counter()
    for file, text in sources().items():
        lines[room_of(file)] += text.count("\n")
    return dict(sorted(lines.items()))


def budget() -> dict[str, int]:
    """The most lines of every room."""
    found: dict[str, int] = tomllib.loads(BUDGET.read_text())["lines"]
    return found


def num_code_lines(text: str) -> int:
    """Lines that are neither empty, comments nor part of a docstring."""
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def num_defined(name: str) -> int:
    """How many functions have this name."""
    return sum(node.name == name for tree in trees() for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def trees() -> Iterator[ast.Module]:
    for text in sources().values():
        yield ast.parse(text)


def num_travelling() -> int:
    """Classes that travel between processes."""
    texts = sources()
    return sum(texts[Path(name)].count("\n@dataclass") for name in MESSAGES)


def num_alike() -> int:
    """Pairs of places that share at least `ALIKE` lines of code one after the other, imports left out."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for file, text in sources().items():
        code = [(n, line.strip()) for n, line in enumerate(text.splitlines()) if line.strip()]
        code = [(n, line) for n, line in code if not line.startswith(("import ", "from ", "#"))]
        for at in range(len(code) - ALIKE + 1):
            places[tuple(line for _, line in code[at : at + ALIKE])].append((file, at))
    pairs = {(one, other) for found in places.values() for one in found for other in found if one < other}
    # A longer stretch is one pair: its second window begins one line later in both places.
    return sum(((one[0], one[1] - 1), (other[0], other[1] - 1)) not in pairs for one, other in pairs)


def table() -> list[tuple[str, str]]:
    """The measures by what they say."""
    texts, rooms = sources(), lines_of_rooms()
    code = sum(map(num_code_lines, texts.values()))
    shell = sum(rooms[room] for room in SHELL) + sum(texts[Path(file)].count("\n") for file in SHELL_FILES)
    docstrings = sum(text.count("\n") for text in texts.values()) - code
    short = [file for file, text in texts.items() if file.name != "__init__.py" and text.count("\n") < SHORT]
    return [
        ("lines of the package", f"{sum(rooms.values()):,}"),
        ("lines of code", f"{code:,}"),
        ("docstrings, comments and empty lines", f"{docstrings:,}"),
        ("files", f"{len(texts)}"),
        (f"files of less than {SHORT} lines", f"{len(short)}"),
        ("lines of the shell", f"{shell:,}"),
        ("classes that travel between processes", f"{num_travelling()}"),
        ("functions called submit", f"{num_defined('submit')}"),
        ("functions called begin", f"{num_defined('begin')}"),
        ("functions called forward_backward", f"{num_defined('forward_backward')}"),
        (f"pairs of places that share {ALIKE} lines", f"{num_alike()}"),
    ]


def main() -> None:
    rows = table()
    width = max(len(what) for what, _ in rows)
    for what, value in rows:
        print(f"{what:<{width}}  {value:>7}")
    print()
    limits = budget()
    for room, lines in sorted(lines_of_rooms().items(), key=lambda pair: -pair[1]):
        print(f"{room:<{width}}  {lines:>7,} of {limits.get(room, 0):,}")


if __name__ == "__main__":
    main()
