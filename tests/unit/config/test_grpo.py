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


def test_a_penalty_for_length_rises_within_the_limit() -> None:
    assert config_of(filter={"overlong_buffer": 16}).filter.overlong_buffer == 16
    with pytest.raises(ValueError, match="filter.overlong_buffer=17 with rollout.max_new_tokens=16"):
        config_of(filter={"overlong_buffer": 17})


def test_completions_count_only_if_some_are_masked() -> None:
    with pytest.raises(ValueError, match="masked_count=true without mask_overlong=true"):
        config_of(filter={"masked_count": True})
