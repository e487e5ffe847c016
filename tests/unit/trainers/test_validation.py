"""What validation measures of completions that failed."""

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.config import RewardConfig
from automodel_rl.errors import RolloutError
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.counts import ErrorWatch
from automodel_rl.rollout.rewards.scorer import Score
from automodel_rl.trainers.validation import Validation
from tests.unit.trainers.test_rollout_batch import config_of

PASSED = Rollout(Completion([5], [-1.0], "stop"), "text", Score(1.0, (1.0,), ("",)))
FAILED = Rollout(Completion([], [], "error", "sandbox is gone"), "", Score(1.0, (1.0,), ("",)))


def measured(groups: list[list[Rollout]], passes_at: float = 1.0) -> tuple[dict[str, float], list[str]]:
    """The metrics of held-out prompts' completions, and what the console says."""
    said: list[str] = []
    validation: Any = object.__new__(Validation)
    validation.config = config_of().model_copy(
        update={"rewards": (RewardConfig.model_validate({"function": "m:judge", "passes_at": passes_at}),)}
    )
    validation.rollouts = SimpleNamespace(errors=ErrorWatch(validation.config.rewards))
    validation.run = SimpleNamespace(
        say=said.append, save_samples=lambda samples, step: None, tokenizer=SimpleNamespace(decode=str)
    )
    validation.prompts = [
        SimpleNamespace(token_ids=[1], media=(), example={}, source=n % 2) for n in range(len(groups))
    ]
    validation.sources = ["even", "odd"]
    return validation._metrics_of(groups, 3), said


@pytest.mark.parametrize("passes_at", [1.0, -1.0])
def test_a_held_out_completion_that_failed_is_counted_and_does_not_pass(passes_at: float) -> None:
    found, said = measured([[PASSED], *[[FAILED]] * 7], passes_at)
    assert (found["val/reward_mean"], found["val/pass@1"], found["val/failed"]) == (0.125, 0.125, 7)
    assert (found["val/even/pass@1"], found["val/odd/reward_mean"]) == (0.25, 0.0)
    assert found["val/error_rate_judge"] == 0  # of calls of rewards
    (warning,) = said
    assert warning.startswith("warning: 7 of 8 held-out completions of step 3 failed")
    assert warning.endswith("sandbox is gone")


def test_of_several_completions_those_that_failed_count_among_the_others() -> None:
    found, _ = measured([[PASSED, FAILED], [FAILED, FAILED]])
    assert (found["val/mean@2"], found["val/pass@2"], found["val/reward_mean"]) == (0.25, 0.5, 0.25)


def test_without_failures_nothing_is_said() -> None:
    found, said = measured([[PASSED]])
    assert (found["val/failed"], said) == (0, [])
    with pytest.raises(RolloutError, match="every completion .* failed .*sandbox is gone"):
        measured([[FAILED]])
