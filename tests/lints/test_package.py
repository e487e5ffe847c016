"""The package as a whole: public names with texts, and rules that every file keeps."""

import ast
import importlib
import importlib.util
import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import automodel_rl
from automodel_rl.config import RunConfig
from tests.lints.problems import assert_none, place
from tests.pages import ROOT, public_methods

FILES = sorted((ROOT / "automodel_rl").rglob("*.py"))
OF_TESTS = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
MAX_LINES, MAX_LINES_OF_A_FUNCTION = 600, 60


def texts_of(name: str) -> list[tuple[str, Any, str]]:
    """A public name and its methods with their own docstrings."""
    thing = getattr(automodel_rl, name)
    texts = [(name, thing, thing.__doc__ or "")]
    if isinstance(thing, type):
        texts += [(f"{name}.{key}", method, method.__doc__ or "") for key, method in public_methods(thing)]
    return texts


def test_public_names_have_texts_with_all_parameters_and_examples() -> None:
    assert_none(problem for name in automodel_rl.__all__ for problem in problems_of_texts(name))


def problems_of_texts(name: str) -> Iterator[str]:
    for full, thing, text in texts_of(name):
        if not text:
            yield f"{full} has no docstring"
        if text.startswith(f"{name}("):
            yield f"{full} has only what dataclass wrote"
        if isinstance(thing, property) or (isinstance(thing, type) and issubclass(thing, BaseModel | Exception)):
            continue
        undocumented = [
            p for p in inspect.signature(thing).parameters if p != "self" and not re.search(rf"\b{p}\b", text)
        ]
        if undocumented and full != "ModelHandle":
            yield f"{full}: nothing on {undocumented}"
    if not any("Example:" in text for _, _, text in texts_of(name)):
        yield f"{name} has no example"


MADE_INSIDE = {
    "AdapterOrigin",
    "CheckpointFamily",
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
    "RoutesRef",
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


def test_types_in_public_signatures_are_public() -> None:
    known = {*automodel_rl.__all__} | MADE_INSIDE
    assert_none(
        f"{name} has {inner}, which is not public"
        for name in automodel_rl.__all__
        for annotation in annotations_of(getattr(automodel_rl, name))
        for inner in own_types(annotation)
        if inner not in known
    )


def functions_of(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_classes_have_names_of_their_own() -> None:
    places = defaultdict[str, list[str]](list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place(file))
    assert_none(f"{name} is in {', '.join(files)}" for name, files in places.items() if len(files) > 1)


def test_files_and_functions_are_short() -> None:
    assert_none(problem for file in (*FILES, *OF_TESTS) for problem in problems_of_length(file))


def problems_of_length(file: Path) -> Iterator[str]:
    if (count := len(file.read_text().splitlines())) > MAX_LINES:
        yield f"{place(file)} has {count} lines, more than {MAX_LINES}"
    for function in functions_of(file):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MAX_LINES_OF_A_FUNCTION:
            yield f"{place(file)}: {function.name} has {lines} lines, more than {MAX_LINES_OF_A_FUNCTION}"


def test_benchmarks_which_no_test_runs_import_names_that_exist() -> None:
    files = (ROOT / "benchmarks").rglob("*.py")
    assert_none(problem for file in sorted(files) for problem in problems_of_imports(file))


def problems_of_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("automodel_rl"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                known = name.name in vars(module) or name.name in dir(module)
                if not known and not importlib.util.find_spec(f"{node.module}.{name.name}"):
                    yield f"{place(file)}: there is no {node.module}.{name.name}"


def test_files_probe_or_patch_nothing() -> None:
    assert_none(problem for file in FILES for problem in problems_of_style(file))


def problems_of_style(file: Path) -> Iterator[str]:
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if name == "hasattr" or (isinstance(node, ast.Call) and name == "getattr" and len(node.args) == 3):
            yield f"{place(file)}, line {node.lineno} probes for an attribute"
    for node in ast.parse(text).body:  # at import
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
            yield f"{place(file)}, line {node.lineno} changes another module when it is imported"
    if re.search(r"(def|class) \w+_v\d\b", text):
        yield f"{place(file)} has a name that ends with a version"
    if file.name in ("utils.py", "helpers.py", "common.py"):
        yield f"{place(file)} has a name that says nothing"
