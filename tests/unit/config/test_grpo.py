"""What a run of reinforcement learning decides by itself from several keys."""

from typing import Any

import pytest

from tests.unit.trainers.test_rollout_batch import config_of

IN_REWARD = {"kl": {"coefficient": 0.1, "where": "reward"}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"batch": {"optimizer_steps": 2}}, False),
        ({"batch": {"epochs": 2}}, False),
        ({"loss": {"kl": {"coefficient": 0.1}}}, True),
        ({"loss": IN_REWARD}, False),
        ({"loss": {"kl": {"coefficient": 0.0, "where": "reward"}}}, True),
        ({"router_replay": {"enabled": True, "compare": True}}, False),
        ({"loss": {"on_policy": False}}, False),
    ],
    ids=str,
)
def test_old_log_probabilities_are_computed_where_something_reads_them(changes: dict[str, Any], expected: bool) -> None:
    assert config_of(**changes).is_on_policy == expected


def test_optimizer_steps_of_all_passes_are_counted() -> None:
    assert config_of(batch={"optimizer_steps": 2, "epochs": 3}).batch.steps_of_all_epochs == 6
