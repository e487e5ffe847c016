"""Rewards at scale: several processes, async functions, batches, and metrics beside the score."""

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from automodel_rl.config import RewardConfig
from automodel_rl.rollout.rewards.scorer import Score, Scorer

REWARDS = "tests.unit.rollout.odd_rewards"


@contextmanager
def running(**values: object) -> Iterator[Scorer]:
    scorer = Scorer([RewardConfig.model_validate(values)])
    try:
        yield scorer
    finally:
        scorer.close()


def scores(scorer: Scorer, completions: list[str], base: float = 0.0) -> list[Score]:
    return scorer.take([scorer.submit(completion, {"base": base}) for completion in completions])


COMPLETIONS = ["x" * (1 + number % 7) for number in range(64)]
LENGTHS = [float(len(completion)) for completion in COMPLETIONS]


def test_processes_work_at_the_same_time_and_scores_keep_their_order() -> None:
    with running(function=f"{REWARDS}:slow", options={"seconds": 0.1}, workers=4) as scorer:
        scores(scorer, COMPLETIONS[:16])  # all processes have started
        started = time.monotonic()
        assert [score.total for score in scores(scorer, COMPLETIONS)] == LENGTHS
        assert time.monotonic() - started < 0.6 * 0.1 * len(COMPLETIONS)


def test_an_async_function_has_many_calls_at_once_in_one_process() -> None:
    with running(function=f"{REWARDS}:judge", options={"seconds": 0.2}) as scorer:
        started = time.monotonic()
        found = scores(scorer, COMPLETIONS)
        assert [score.total for score in found] == LENGTHS
        assert [score.metrics for score in found] == [({"words": 1.0, "seen": 1.0},)] * len(COMPLETIONS)
        assert time.monotonic() - started < 0.5 * 0.2 * len(COMPLETIONS)


def test_calls_of_an_async_function_fail_alone() -> None:
    with running(function=f"{REWARDS}:judge", options={"seconds": 0.01}, time_limit=1.0, on_error=-1.0) as scorer:
        found = scores(scorer, ["a", "raise", "never", "bb"])
        assert [score.total for score in found] == [1.0, -1.0, -1.0, 2.0]
        assert "RuntimeError: no way (at " in found[1].errors[0]
        assert "took longer than time_limit=1.0 s" in found[2].errors[0]


@pytest.mark.parametrize(
    ("completion", "time_limit", "message"),
    [
        ("block", 0.5, r"took longer than time_limit=0.5 s, and blocked concurrent calls \(completion 'block'\)"),
        ("block briefly", 0.5, r"took longer than time_limit=0.5 s|blocked its process for longer .*'block briefly'"),
        ("exit", 60.0, r"its process exited with code 3 \(completion 'exit'\)"),
    ],
)
def test_an_async_call_that_takes_its_process_along_is_named_and_others_go_on(
    completion: str, time_limit: float, message: str
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        running(
            function=f"{REWARDS}:judge", options={"seconds": 0.01}, time_limit=time_limit, on_error=-1.0, concurrency=9
        ) as scorer,
    ):
        patch.setattr("automodel_rl.rollout.rewards.pool.GRACE_SECONDS", 0.5)
        bad, *others = scores(scorer, [completion, *COMPLETIONS[:8]])
        assert re.search(message, bad.errors[0])
        assert [score.total for score in others] == LENGTHS[:8]  # they waited beside it, and were called again
        assert scores(scorer, ["aa"])[0].total == 2.0


@pytest.mark.parametrize(
    ("on_error", "of_completion", "of_world"),
    [("auto", 0.0, math.nan), ("leave_out", math.nan, math.nan), (-1.0, -1.0, -1.0)],
)
def test_a_failed_call_scores_by_the_kind_of_its_error(on_error: object, of_completion: float, of_world: float) -> None:
    with running(function=f"{REWARDS}:plain_judge", on_error=on_error) as scorer:
        found = scores(scorer, ["down", "gone", "odd", "key", "abstain", "fine"])
        expected = [of_world, of_world, of_completion, of_completion, of_completion, 4.0]
        assert [score.total for score in found] == pytest.approx(expected, nan_ok=True)
        assert [score.is_excluded for score in found] == [math.isnan(total) for total in expected]
        assert [bool(score.errors[0]) for score in found] == [True] * 5 + [False]


def test_every_error_of_an_async_judge_leaves_the_completion_out_by_default() -> None:
    with running(function=f"{REWARDS}:judge", options={"seconds": 0.01}, time_limit=0.5) as scorer:
        assert [score.is_excluded for score in scores(scorer, ["raise", "never", "a"])] == [True, True, False]


def test_a_call_that_never_returns_holds_up_one_process_only() -> None:
    values = {"options": {"seconds": 0.0}, "workers": 2, "time_limit": 1.0, "on_error": -1.0}
    with running(function=f"{REWARDS}:slow", **values) as scorer:
        assert [score.total for score in scores(scorer, ["never", "a", "bb", "never", "ccc"])] == [-1, 1, 2, -1, 3]


def test_a_batch_function_gets_all_completions_and_examples() -> None:
    with running(function=f"{REWARDS}:ranks", on_error=-1.0) as scorer:
        assert [score.total for score in scores(scorer, ["ccc", "a", "bb"], base=1.0)] == [3.0, 1.0, 2.0]
        wrong = scores(scorer, ["short", "b"])
        assert [score.total for score in wrong] == [-1.0, -1.0]
        assert "returned 1 scores for 2 completions" in wrong[1].errors[0]
        assert scores(scorer, []) == []
    with running(function=f"{REWARDS}:ranks", workers=2) as scorer:
        assert [score.total for score in scores(scorer, ["a", "bb", "a", "bb", "ccc"])] == [
            0,
            2,
            0,
            0,
            1,
        ]  # in two parts


def test_metrics_beside_the_score_are_numbers() -> None:
    with running(function=f"{REWARDS}:scored") as scorer:
        good, *wrong = scores(scorer, ["good", "nan", "text"])
        assert (good.total, good.metrics) == (1.0, ({"a": 2.0},))
        assert "for the metric a, which is not a finite number" in wrong[0].errors[0]
        assert "nor a number with a dict of metrics" in wrong[1].errors[0]


def test_a_pool_that_is_closed_in_the_middle_leaves_no_thread() -> None:
    with running(function=f"{REWARDS}:slow", options={"seconds": 30.0}, workers=2, time_limit=60.0) as scorer:
        scorer.submit("a", {})
        scorer.submit("b", {})
        threads = scorer.pools[0]._threads
    assert not any(thread.is_alive() for thread in threads)
