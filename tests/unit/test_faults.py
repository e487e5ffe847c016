"""Bugs that `make faults` plants: each has a place in the code and a test, and the pages count them."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.faults.fault import Verified
from tests.faults.table import FAULTS, planted
from tests.longer import ALL, LONGER, WHOLE_FILES, is_longer

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "automodel_rl"
SOURCES = {file.name: file.read_text() for file in (TESTS / "faults").glob("*.py")}
ROOMS = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())


@functools.cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def is_there(name: str) -> bool:
    file, _, function = name.partition("[")[0].partition("::")
    return function in functions_of(file)


def test_every_bug_can_be_planted() -> None:
    """What it changes must be there still."""
    for name in FAULTS:
        with planted(name):
            pass


def test_every_bug_is_looked_for_in_each_commit() -> None:
    by_tests = {name: fault.caught_by for name, fault in FAULTS.items() if not isinstance(fault.caught_by, Verified)}
    assert not [name for name, by in by_tests.items() if not is_there(by)]
    longer = [
        name
        for name, by in by_tests.items()
        if LONGER.get(by.partition("[")[0]) == ALL or by.partition("::")[0] in WHOLE_FILES
    ]
    assert not [*longer, *(name for name, by in by_tests.items() if "[" in by and is_longer(by))]


def test_every_longer_test_is_there() -> None:
    assert not [name for name in LONGER if not is_there(name)]
    assert not [file for file in WHOLE_FILES if not (TESTS / file).is_file()]


def test_every_room_has_a_bug() -> None:
    def has_one(room: str) -> bool:
        planted_in = re.compile(rf"""["']{room}\.|from automodel_rl\.{room}\b|automodel_rl\.{room}\.""")
        return any(planted_in.search(text) for text in SOURCES.values())

    assert not [room for room in ROOMS if not has_one(room)]


@pytest.mark.parametrize(
    "page", [TESTS / "README.md", PACKAGE / "tools" / "README.md"], ids=lambda page: page.parent.name
)
def test_pages_know_the_number_of_bugs(page: Path) -> None:
    assert re.findall(r"plants (\d+) bugs", page.read_text()) == [str(len(FAULTS))]
