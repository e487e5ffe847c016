"""Rewards that fail beside others that work: how often, said once and again when it gets clearly worse."""

from automodel_rl.config import RewardConfig
from automodel_rl.rollout.groups import pass_rates
from automodel_rl.rollout.rewards.counts import ErrorWatch, error_rates, metric_means
from automodel_rl.rollout.rewards.scorer import Score

NAMES = ["math", "judge"]


def scores(failed: int, of: int = 16) -> list[Score]:
    good, bad = Score(1.0, (1.0, 0.0), ("", "")), Score(1.0, (1.0, 0.0), ("", "m:judge: KeyError: 'x' (at m.py:3)"))
    return [bad] * failed + [good] * (of - failed)


def test_the_rate_of_each_function_is_told() -> None:
    assert error_rates(scores(4), NAMES) == {"math": 0.0, "judge": 0.25}


def test_a_function_is_named_once_and_again_when_it_gets_clearly_worse() -> None:
    watch = ErrorWatch([RewardConfig(function="math"), RewardConfig(function="m:judge", on_error=-1.0)])
    assert watch.warnings(scores(0), "step 1") == []
    (first,) = watch.warnings(scores(4), "step 2")
    assert "rewards.function=m:judge failed in 25% of its calls in step 2" in first
    assert "which scored on_error=-1" in first
    assert "KeyError: 'x' (at m.py:3)" in first
    assert [watch.warnings(scores(n), "step 3") for n in (4, 7, 0, 4)] == [[], [], [], []]
    (second,) = watch.warnings(scores(8), "step 4")
    assert "50% of its calls in step 4" in second
    assert watch.warnings(scores(15), "step 5") == []
    assert len(watch.warnings(scores(16), "step 6")) == 1
    assert watch.warnings(scores(16), "step 7") == []


def test_a_rare_error_is_no_0_percent() -> None:
    (warning,) = ErrorWatch([RewardConfig(function="m:judge")]).warnings(
        [Score(0.0, (0.0,), ("m:judge: no",)), *[Score(0.0, (0.0,), ("",))] * 9999], "step 1"
    )
    assert "0.01% of its calls" in warning


def test_a_completion_passes_by_the_reward_that_tells_and_not_by_a_failed_call() -> None:
    right, wrong = Score(2.0, (0.0, 2.0), ("", "")), Score(1.0, (1.0, 0.0), ("", ""))
    failed = Score(3.0, (1.0, 2.0), ("", "m:judge: no"))
    assert pass_rates([[right], [wrong], [wrong], [failed]], index=1, passes_at=2.0) == {"pass@1": 0.25}


def test_metrics_are_means_over_the_completions_that_have_them() -> None:
    scores = [Score(0.0, (0.0, 0.0), ("", ""), metrics) for metrics in (({}, {"a": 1.0}), ({}, {"a": 2.0, "b": 5.0}))]
    assert metric_means(scores, NAMES) == {"metric_judge_a": 1.5, "metric_judge_b": 5.0}
    assert metric_means([Score(0.0, (0.0, 0.0), ("", ""))], NAMES) == {}
