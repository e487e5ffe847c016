"""Spans of work of a step."""

import time

from automodel_rl.generators.member import name_of
from automodel_rl.launch.timeline import REWARDS, TRAINER, StepTimeline


def test_lanes_come_with_the_trainer_first_and_times_from_the_step_on() -> None:
    timeline, zero = StepTimeline(), time.time()
    timeline.add(REWARDS, zero + 1)
    timeline.add(name_of(10, has_joined=False), zero - 2)
    timeline.add(name_of(2, has_joined=False), zero)
    timeline.add(name_of(None, has_joined=False), zero)
    timeline.add(TRAINER, zero, "rollout")
    timeline.add(TRAINER, zero + 3, "train")
    lanes = timeline.take(zero)
    assert [lane["lane"] for lane in lanes] == [
        "trainer",
        "rewards",
        "generators",
        "generator of rank 2",
        "generator of rank 10",
    ]
    assert lanes[0]["names"] == ["rollout", "train"]
    assert [start for start, _ in lanes[0]["spans"]] == [0.0, 3.0]
    assert lanes[4]["spans"][0][0] == -2.0
    assert "names" not in lanes[4]
    assert timeline.take(zero) == []
