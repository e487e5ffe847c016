"""The package as a whole: public names with texts, light imports, and rules that every file keeps."""

import ast
import importlib
import importlib.util
import inspect
import re
import resource
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import automodel_rl
from automodel_rl.config import RunConfig
from tests.pages import ROOT, public_methods

FILES = sorted((ROOT / "automodel_rl").rglob("*.py"))
OF_TESTS = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 60


def texts_of(name: str) -> list[tuple[str, Any, str]]:
    """A public name and its methods with their own docstrings."""
    thing = getattr(automodel_rl, name)
    texts = [(name, thing, thing.__doc__ or "")]
    if isinstance(thing, type):
        texts += [(f"{name}.{key}", method, method.__doc__ or "") for key, method in public_methods(thing)]
    return texts


@pytest.mark.parametrize("name", automodel_rl.__all__)
def test_public_names_have_texts_with_all_parameters_and_examples(name: str) -> None:
    for place, thing, text in texts_of(name):
        assert text, f"{place} has no docstring"
        assert not text.startswith(f"{name}("), f"{place} has only what dataclass wrote"
        if isinstance(thing, property) or (isinstance(thing, type) and issubclass(thing, BaseModel | Exception)):
            continue
        undocumented = [
            p for p in inspect.signature(thing).parameters if p != "self" and not re.search(rf"\b{p}\b", text)
        ]
        assert place == "ModelHandle" or not undocumented, f"{place}: nothing on {undocumented}"
    assert "Example:" in texts_of(name)[0][2] or any("Example:" in text for _, _, text in texts_of(name)), name


MADE_INSIDE = {
    "AdapterOrigin",
    "ChatTemplate",
    "Completion",
    "Crew",
    "EmptyModel",
    "GeneratorSpec",
    "Head",
    "Layout",
    "LoadedStep",
    "LocalMicrobatch",
    "LossTotals",
    "Meshes",
    "ModelDescription",
    "OpenedModel",
    "OpenedRun",
    "Component",
    "Packing",
    "PromptStream",
    "Promptlike",
    "Request",
    "Resumable",
    "RewardConfig",
    "Rollout",
    "RoutesAt",
    "Sample",
    "Sampling",
    "Share",
    "Source",
    "Step",
    "StepSize",
    "TrainedState",
}
"""What parts of the package hand each other through public classes, or give users who need not make it."""


def own_types(annotation: Any) -> Iterator[str]:
    """Names of the package's classes in an annotation, those of what it calls and returns included."""
    if isinstance(annotation, list | tuple):
        for part in annotation:
            yield from own_types(part)
    elif typing.get_args(annotation):
        yield from own_types(typing.get_args(annotation))
    elif isinstance(annotation, type) and annotation.__module__.startswith("automodel_rl"):
        yield annotation.__name__


def annotations_of(thing: Any) -> Iterator[Any]:
    """Those of a public function, or of a class's fields or constructor and of its methods."""
    if not isinstance(thing, type):
        yield from typing.get_type_hints(thing).values()
        return
    if issubclass(thing, BaseModel):
        # Whole runs are made of files or mappings, by load_config or model_validate; nobody makes their sections.
        yield from () if issubclass(thing, RunConfig) else (info.annotation for info in thing.model_fields.values())
    elif not issubclass(thing, Exception):
        yield from typing.get_type_hints(thing.__init__).values()
    for _, method in public_methods(thing):
        yield from typing.get_type_hints(method.fget if isinstance(method, property) else method).values()


@pytest.mark.parametrize("name", automodel_rl.__all__)
def test_types_in_public_signatures_are_public(name: str) -> None:
    used = {inner for annotation in annotations_of(getattr(automodel_rl, name)) for inner in own_types(annotation)}
    assert used <= {*automodel_rl.__all__} | MADE_INSIDE


def test_public_names_are_listed_and_others_unknown() -> None:
    assert set(automodel_rl.__all__) <= set(dir(automodel_rl))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        automodel_rl.nonsense  # noqa: B018


def test_help_needs_no_torch_and_under_a_second_of_the_processor() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "automodel_rl", "--help"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.0
    assert "usage: automodel-rl COMMAND" in result.stdout
    assert not any(line.endswith((" torch", " numpy", " transformers")) for line in result.stderr.splitlines())


def test_importing_the_library_prints_nothing() -> None:
    script = f"import automodel_rl; [getattr(automodel_rl, name) for name in {automodel_rl.__all__}]"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout + result.stderr == ""


def functions_of(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("file", [*FILES, *OF_TESTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MOST_LINES
    for function in functions_of(file):
        lines = (function.end_lineno or 0) - function.lineno + 1
        assert lines <= MOST_LINES_OF_A_FUNCTION, f"{function.name} has {lines} lines"


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda file: file.name)
def test_benchmarks_which_no_test_runs_import_names_that_exist(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("automodel_rl"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                known = name.name in vars(module) or name.name in dir(module)
                assert known or importlib.util.find_spec(f"{node.module}.{name.name}"), f"{node.module}.{name.name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_probe_or_patch_nothing(file: Path) -> None:
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_probe = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            assert not is_probe, f"line {node.lineno} probes for an attribute"
    for node in ast.parse(text).body:  # at import
        is_patch = isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets)
        assert not is_patch, f"line {node.lineno} changes another module when it is imported"
    assert not re.search(r"(def|class) \w+_v\d\b", text)
    assert file.name not in ("utils.py", "helpers.py", "common.py")
