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
from automodel_rl.support.rule import Breach, Rule
from automodel_rl.support.table import RULES, check_supported
from tests.unit.support.combinations import combination

EXAMPLES = [(rule, example) for rule in RULES for example in rule.refuses]
ROOM = Path(support.__file__).parent
MODULES = [importlib.import_module(f"{support.__name__}.{file.stem}") for file in sorted(ROOM.glob("*_rules.py"))]
OF_RUNS = [example for rule, example in EXAMPLES if "algorithm" in {**example.beside, **example.asks}]


@pytest.fixture(autouse=True)
def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "TORCH", (2, 13))


def test_configs_and_tables_know_the_same_schedules_and_attention_backends() -> None:
    assert set(typing.get_args(Schedule)) == set(schedules.SCHEDULES)
    assert set(typing.get_args(Attention)) - {"auto"} == set(ATTENTION) == set(BACKENDS)


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=[example.says for _, example in EXAMPLES])
def test_an_example_is_refused_by_its_own_rule_and_only_for_what_it_asks(rule: Rule, example: Breach) -> None:
    check_supported(combination(example.beside))
    asked = combination(example.beside, example.asks)
    assert rule.refusal is not None
    refusal = rule.refusal(asked)
    assert refusal is not None
    assert refusal.startswith(example.says)
    with pytest.raises(InputError) as error:
        check_supported(asked)
    assert str(error.value) == refusal


def test_rules_that_refuse_have_examples_and_others_have_none() -> None:
    assert [rule.feature for rule in RULES if bool(rule.refuses) != (rule.refusal is not None)] == []


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
        for rule, example in EXAMPLES:
            assert rule.refusal is not None
            rule.refusal(combination(example.beside, example.asks))
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
    with pytest.raises(InputError, match="ZBVZeroBubble needs torch 2.13, and this is"):
        check_supported(asked)
