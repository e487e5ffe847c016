"""Private names of libraries live in one room, whose files were checked with the versions that are installed."""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from automodel_rl.compat.versions import CHECKED
from tests.pages import ROOT

PACKAGE = ROOT / "automodel_rl"
FILES = sorted(PACKAGE.rglob("*.py"))
OF_PYTHON = {"_exit", "_current_frames"}
STANDS_ALONE = {"vllm_worker.py", "vllm_same_device.py", "vllm_versions.py"}
"""They run in vLLM's environment, without this package."""


def own_private_names() -> set[str]:
    """Private names that the package itself gives to functions, classes and attributes."""
    names: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if is_private(name)}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def foreign_private_names(file: Path, own: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("automodel_rl"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"line {node.lineno}: {part}" for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | OF_PYTHON:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_private_names_of_libraries_are_used_in_the_compat_room_alone() -> None:
    own = own_private_names()
    rooms = [file for file in FILES if file.parent.name != "compat" and file.name not in STANDS_ALONE]
    found = {str(file.relative_to(ROOT)): list(foreign_private_names(file, own)) for file in rooms}
    assert {file: names for file, names in found.items() if names} == {}


def test_a_private_name_of_a_library_would_be_noticed(tmp_path: Path) -> None:
    file = tmp_path / "somewhere.py"
    file.write_text("from torch.utils._pytree import tree_leaves\n\ntensor._make_subclass()\nself._own\n")
    assert list(foreign_private_names(file, {"_own"})) == ["line 1: _pytree", "line 3: tensor._make_subclass"]


@pytest.mark.parametrize("library", CHECKED)
def test_the_installed_version_is_one_that_was_checked(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    assert version(library).partition("+")[0] in CHECKED[library]
