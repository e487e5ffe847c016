"""Which groups of a step are learned from."""

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.trainers.rollout_batch import batch_of
from automodel_rl.trainers.step_rollouts import StepRollouts
from tests.unit.rollout.test_groups import PROMPT, cut, rollout
from tests.unit.trainers.test_rollout_batch import config_of


def chosen_of(groups: list[list[Rollout]], **changes: Any) -> list[Group]:
    """The groups to learn from if generators write these."""
    collected: Any = object.__new__(StepRollouts)
    collected.config = config_of(rollout={"prompts": len(groups)}, **changes)
    queue = SimpleNamespace(next=lambda steps: ([PROMPT] * len(groups), groups), more=lambda count: ([], []))
    collected.queue, collected.run = queue, SimpleNamespace(steps_left=1)
    return collected._generate()  # type: ignore[no-any-return]


GROUPS = [[rollout(1.0), rollout(0.0), cut(0.0)], [rollout(0.0), rollout(0.0), cut(1.0)], [rollout(0.0), cut(1.0)]]


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ({"mask_overlong": True}, [[1.0, 0.0], [0.0, 0.0]]),
        ({"mask_overlong": True, "dynamic": True}, [[1.0, 0.0]]),
        ({"mask_overlong": True, "masked_count": True}, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0]]),
        ({}, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0]]),
    ],
)
def test_masked_completions_are_compared_only_if_they_count(
    filter: dict[str, Any], expected: list[list[float]]
) -> None:
    chosen = chosen_of(GROUPS, filter=filter)
    assert [group.rewards.tolist() for group in chosen] == expected
    batch = batch_of(chosen, config_of(filter=filter))
    assert batch.num_episodes == sum(map(len, expected))  # what normalise=sequence and constant divide by


def test_a_step_whose_completions_are_all_masked_takes_place_and_teaches_nothing() -> None:
    (group,) = chosen_of([[rollout(1.0), cut(0.0), cut(0.5)]], filter={"mask_overlong": True})
    assert not group.rewards.any()
    assert not group.has_signal
