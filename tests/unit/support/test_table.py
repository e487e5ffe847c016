"""What is refused, that each refusal has an example, and that every place knows the same names."""

import ast
import dataclasses
import importlib
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from automodel_rl import support
from automodel_rl.config.model import Attention
from automodel_rl.config.parallel import Schedule
from automodel_rl.errors import InputError
from automodel_rl.model.attention import BACKENDS
from automodel_rl.parallel.pipeline import schedules
from automodel_rl.support.attention import ATTENTION
from automodel_rl.support.capabilities import INCOMPATIBILITIES, refuse_incompatible_pairs
from automodel_rl.support.combination import Combination
from automodel_rl.support.rule import Refusal
from automodel_rl.support.table import REFUSALS, check_supported
from tests.unit.support.combinations import combination
from tests.unit.support.examples import EXAMPLES, Breach

ROOM = Path(support.__file__).parent
MODULES = [importlib.import_module(f"{support.__name__}.{file.stem}") for file in sorted(ROOM.glob("*_rules.py"))]
OF_RUNS = [
    example
    for example in EXAMPLES
    if {**example.beside, **example.asks}.get("algorithm", "reward") != "reward"  # whose head is the model's own
]


@pytest.fixture(autouse=True)
def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "TORCH", (2, 13))


def test_configs_and_tables_know_the_same_schedules_and_attention_backends() -> None:
    assert set(typing.get_args(Schedule)) == set(schedules.SCHEDULES)
    assert set(typing.get_args(Attention)) - {"auto"} == set(ATTENTION) == set(BACKENDS)


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.says for example in EXAMPLES])
def test_an_example_is_refused_and_only_for_what_it_asks(example: Breach) -> None:
    check_supported(combination(example.beside))
    asked = combination(example.beside, example.asks)
    with pytest.raises(InputError) as error:
        check_supported(asked)
    assert str(error.value).startswith(example.says)


def refusal_of(asked: Combination) -> Refusal:
    return next(refusal for refusal in REFUSALS if refusal(asked) is not None)


def test_every_pair_has_an_example() -> None:
    asked = [combination(example.beside, example.asks) for example in EXAMPLES]
    by_pairs = [each for each in asked if refusal_of(each) is refuse_incompatible_pairs]
    shown = {
        lack for lack in INCOMPATIBILITIES for each in by_pairs if lack.refusal(each) == refuse_incompatible_pairs(each)
    }
    assert [f"{lack.other.name} with {lack.feature.name}" for lack in INCOMPATIBILITIES if lack not in shown] == []


def test_every_refusal_has_an_example() -> None:
    lines = {(str(module.__file__), line) for module in MODULES for line in refusing_lines(module)}
    reached: set[tuple[str, int]] = set()

    def on_return(frame: FrameType, event: str, value: Any) -> Any:
        if event == "return" and value is not None:
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return on_return

    files = {file for file, _ in lines}
    before = sys.gettrace()
    sys.settrace(lambda frame, *_: on_return if frame.f_code.co_filename in files else None)
    try:
        for example in EXAMPLES:
            asked = combination(example.beside, example.asks)
            refusal_of(asked)(asked)
    finally:
        sys.settrace(before)
    assert len(lines) > 30
    assert lines - reached == set()


def refusing_lines(module: ModuleType) -> Iterator[int]:
    """Where a statement of a module returns something else than None."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.Return) and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node.lineno


@pytest.mark.parametrize("example", OF_RUNS, ids=[example.says for example in OF_RUNS])
def test_a_model_without_a_run_is_not_judged_by_rules_of_runs(example: Breach) -> None:
    asked = combination(example.beside, example.asks)
    check_supported(dataclasses.replace(asked, run=None))


def test_schedules_that_split_the_backward_need_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = combination({"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "parallel.virtual_stages": 2})
    check_supported(asked)
    monkeypatch.setattr(schedules, "TORCH", (2, 11))
    with pytest.raises(InputError, match="ZBVZeroBubble needs torch 2.13, but this is"):
        check_supported(asked)
