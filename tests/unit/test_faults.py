"""Bugs that `make faults` plants: each has a place in the code and a test, and the pages count them."""

import ast
import re
from pathlib import Path

import pytest

from tests.faults.fault import Verified
from tests.faults.table import FAULTS, planted
from tests.longer import ALL, LONGER, is_longer

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "automodel_rl"
SOURCES = {file.name: file.read_text() for file in (TESTS / "faults").glob("*.py")}
ROOMS = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())


@pytest.mark.parametrize("name", FAULTS)
def test_every_bug_can_be_planted_and_is_looked_for(name: str) -> None:
    """What it changes must be there still, and the test that is to notice it."""
    with planted(name):
        pass
    by = FAULTS[name].caught_by
    if not isinstance(by, Verified):
        file, _, function = by.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function.partition("[")[0] in names
        assert LONGER.get(by.partition("[")[0]) != ALL, "it is not looked at in each commit"
        assert "[" not in by or not is_longer(by), "it is not looked at in each commit"


@pytest.mark.parametrize("name", LONGER)
def test_every_longer_test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in {node.name for node in ast.parse((TESTS / file).read_text()).body if hasattr(node, "name")}


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_bug(room: str) -> None:
    planted_in = re.compile(rf"""["']{room}\.|from automodel_rl\.{room}\b|automodel_rl\.{room}\.""")
    assert any(planted_in.search(text) for text in SOURCES.values())


@pytest.mark.parametrize(
    "page", [TESTS / "README.md", PACKAGE / "tools" / "README.md"], ids=lambda page: page.parent.name
)
def test_pages_know_the_number_of_bugs(page: Path) -> None:
    assert re.findall(r"plants (\d+) bugs", page.read_text()) == [str(len(FAULTS))]
