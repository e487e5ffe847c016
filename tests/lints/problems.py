"""Problems that a lint finds, and where."""

from collections.abc import Iterable
from pathlib import Path

from tests.pages import ROOT


def assert_none(problems: Iterable[str]) -> None:
    """Fails with all problems, a line each."""
    found = [*problems]
    assert not found, "\n".join(["", *found])


def place(file: Path) -> str:
    """A file's name for people."""
    return str(file.relative_to(ROOT))
