"""README and API.md say what the code is."""

import ast
import re
from pathlib import Path

import pytest

import automodel_rl
from tests import pages

FLOW = re.compile(r"\(([\w/]+\.py):\s([\w.,\s]+)\)")


def test_generated_parts_of_readme_are_up_to_date() -> None:
    readme = pages.README.read_text()
    assert pages.with_generated_parts(readme) == readme, "run make pages"


def test_the_page_of_the_api_is_up_to_date() -> None:
    assert pages.api() == pages.API.read_text(), "run make pages"


def test_the_page_of_the_api_has_every_public_name_once() -> None:
    assert sorted(name for names in pages.GROUPS.values() for name in names) == sorted(automodel_rl.__all__)


def names_in(file: Path) -> set[str]:
    """Functions, classes, methods and constants that a file defines."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("file", "names"), FLOW.findall(pages.README.read_text()))
def test_what_readme_names_is_where_it_says(file: str, names: str) -> None:
    missing = {name.strip() for name in names.split(",")} - names_in(pages.ROOT / "automodel_rl" / file)
    assert not missing


def test_readme_names_places() -> None:
    assert len(FLOW.findall(pages.README.read_text())) > 25


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./]+)\)", pages.README.read_text()))))
def test_links_of_readme_lead_somewhere(path: str) -> None:
    assert (pages.ROOT / path).exists()
