"""The learning rate over a run whose steps make fewer optimizer steps than planned, or whose length changes."""

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers import learning_rate
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.trainers.online import OnlineRun
from automodel_rl.trainers.run import Goal, Run
from tests.unit.trainers.test_rollout_batch import config_of

COSINE = OptimizerConfig(lr=1.0, decay="cosine")


def places_of(counts: list[int], idle_steps: int = 0) -> list[list[float]]:
    """The places of the optimizer steps of a run of steps with so many, of which 4 are planned for each."""
    online: Any = object.__new__(OnlineRun)
    online.config = config_of(batch={"optimizer_steps": 2, "epochs": 2})
    return [
        online.places(SimpleNamespace(number=number), count, idle_steps) for number, count in enumerate(counts, start=1)
    ]


def test_steps_with_fewer_optimizer_steps_than_planned_do_not_hold_the_rate_up() -> None:
    assert places_of([4, 4]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    places = places_of([2, 1, 1, 4])
    assert places == [[0, 2], [4], [8], [12, 13, 14, 15]]
    rates = [learning_rate(COSINE, place, 16) for place in places[-1]]
    assert rates[0] < 0.15
    assert sum(rates) / 4 == pytest.approx(0.07, abs=0.005)


def test_steps_before_the_first_that_trains_do_not_count() -> None:
    assert places_of([4, 4], idle_steps=1)[1] == [0, 1, 2, 3]


def test_a_rank_gives_its_engine_the_place() -> None:
    asked: list[Any] = []
    rank: Any = object.__new__(PolicyRank)
    rank.engine = SimpleNamespace(train_step=lambda *given: asked.append(given[-1]))
    rank.train_step(None, len, None, None, False, 2.5)  # type: ignore[arg-type]
    assert asked == [2.5]


@pytest.mark.parametrize(
    ("decay", "planned", "step", "warning"),
    [
        ("cosine", 4, 4, "after step 4 optimizer.decay=cosine continues with a learning rate of 0.5 instead of 0"),
        ("linear", 4, 2, "planned for 4 steps and now has 8, so after step 2"),
        ("linear", 16, 4, "planned for 16 steps and now has 8"),
        ("constant", 4, 4, None),
        ("cosine", 8, 4, None),
        ("cosine", None, 4, None),
        ("cosine", 4, 0, None),
    ],
)
def test_another_length_that_changes_the_rate_is_said(
    decay: str, planned: int | None, step: int, warning: str | None
) -> None:
    said: list[str] = []
    run: Any = object.__new__(Run)
    run.step, run._planned_steps, run.goal = step, planned, Goal(8)
    run.config = SimpleNamespace(optimizer=OptimizerConfig.model_validate({"lr": 1.0, "decay": decay}))
    run.policy, run.progress = SimpleNamespace(total_steps=16), SimpleNamespace(say=said.append)
    run._warn_of_another_rate()
    assert len(said) == (warning is not None)
    assert warning is None or warning in said[0]
