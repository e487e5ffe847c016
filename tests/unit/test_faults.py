"""Bugs that `make faults` plants: each has a place in the code and a test, and the pages count them."""

import ast
import functools
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest

from tests.faults import planted
from tests.faults.fault import Verified
from tests.faults.table import FAULTS
from tests.longer import LONGER, WHOLE_FILES, is_longer

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


def is_callable_as(replacement: Any, original: Any) -> bool:
    """Whether a function takes the arguments of the one that it replaces."""
    if not (isinstance(replacement, FunctionType) and isinstance(original, FunctionType)):
        return True
    parameters = inspect.signature(original).parameters.values()
    by_place = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(replacement).bind(*by_place, **by_name)
    except TypeError:
        return False
    return True


def test_every_bug_can_be_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it changes is still there, and still takes the same arguments."""
    patches, enter = [], mock._patch.__enter__  # type: ignore[attr-defined]

    def entered(patch: Any) -> Any:
        replacement = enter(patch)
        patches.append((patch.attribute, replacement, patch.temp_original))
        return replacement

    monkeypatch.setattr(mock._patch, "__enter__", entered)  # type: ignore[attr-defined]
    unfit = []
    for name in FAULTS:
        patches.clear()
        with planted(name):
            unfit += [(name, what) for what, new, old in patches if not is_callable_as(new, old)]
    assert not unfit


def test_every_bug_is_looked_for_in_each_commit() -> None:
    by_tests = {name: fault.caught_by for name, fault in FAULTS.items() if not isinstance(fault.caught_by, Verified)}
    assert not [name for name, by in by_tests.items() if not is_there(by)]
    longer = [
        name
        for name, by in by_tests.items()
        if LONGER.get(by.partition("[")[0]) == [] or by.partition("::")[0] in WHOLE_FILES
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
