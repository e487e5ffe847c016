"""How far generators are ahead of training, and where a run goes on."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.config import RolloutConfig
from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Sampling
from automodel_rl.trainers.rollout_queue import RolloutQueue


class Prompts:
    """Numbers."""

    def __init__(self) -> None:
        self.place = 0

    def take(self, count: int) -> list[int]:
        self.place += count
        return list(range(self.place - count, self.place))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Generators:
    """Notes what it is asked, and gives back what it was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = False

    def submit(self, prompts: list[int], group_size: int, sampling: Sampling, keeps_routes: bool) -> list[int]:
        assert (group_size, sampling, keeps_routes) == (8, Sampling(1024), True)
        self.log.append(f"asked {prompts[0]}")
        return prompts

    def take(self, pending: list[int]) -> list[int]:
        if self.fails:
            raise RolloutError("gone")
        self.log.append(f"took {pending[0]}")
        return pending


def make_queue(max_staleness: int) -> tuple[RolloutQueue, Any, Any]:
    prompts: Any = Prompts()
    generators: Any = Generators()
    settings = {"prompts": 2, "generator": {"kind": "transformers", "place": "shared"}, "max_staleness": max_staleness}
    generators.config = SimpleNamespace(rollout=RolloutConfig.model_validate(settings))
    return RolloutQueue(prompts, generators), prompts, generators


@pytest.mark.parametrize(
    ("max_staleness", "log"),
    [
        (0, "asked 0, took 0, asked 2, took 2, asked 4, took 4"),
        (1, "asked 0, asked 2, took 0, asked 4, took 2, took 4"),
        (2, "asked 0, asked 2, asked 4, took 0, took 2, took 4"),
        (5, "asked 0, asked 2, asked 4, took 0, took 2, took 4"),
    ],
)
def test_generators_are_asked_ahead_but_not_beyond_the_end(max_staleness: int, log: str) -> None:
    queue, _, generators = make_queue(max_staleness)
    batches = [queue.next(steps_left) for steps_left in (3, 2, 1)]
    assert [prompts for prompts, _ in batches] == [[0, 1], [2, 3], [4, 5]]
    assert all(prompts == rollouts for prompts, rollouts in batches)
    assert ", ".join(generators.log) == log


def test_a_run_goes_on_with_the_first_batch_that_was_not_taken() -> None:
    queue, prompts, generators = make_queue(2)
    queue.next(9)
    assert prompts.place == 6
    assert queue.state_dict() == {"place": 6, "size": 2, "ahead": [{"place": 2}, {"place": 4}]}
    generators.fails = True
    with pytest.raises(RolloutError):
        queue.next(8)
    assert queue.state_dict()["ahead"][0] == {"place": 2}
    again, _, _ = make_queue(2)
    again.load_state_dict(queue.state_dict())
    assert again.next(8)[0] == [2, 3]
    queue.load_state_dict({"place": 2})
    generators.fails = False
    assert queue.next(8)[0] == [2, 3]


def test_refills_come_after_what_is_under_way() -> None:
    queue, _, generators = make_queue(1)
    queue.next(9)
    assert queue.more(1)[0] == [4]
    assert queue.next(8)[0] == [2, 3]
    assert generators.log[-2:] == ["asked 5", "took 2"]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_run_that_is_resumed_after_refills_draws_the_prompts_of_an_undisturbed_one(max_staleness: int) -> None:
    def step(queue: RolloutQueue, steps_left: int) -> list[int]:
        return [*queue.next(steps_left)[0], *queue.more(1)[0], *queue.more(2)[0]]  # type: ignore[list-item]

    undisturbed, _, _ = make_queue(max_staleness)
    expected = [step(undisturbed, steps_left) for steps_left in (5, 4, 3, 2, 1)]
    assert len({prompt for prompts in expected for prompt in prompts}) == 25
    queue, _, _ = make_queue(max_staleness)
    found = []
    for steps_left in (5, 4, 3, 2, 1):
        found.append(step(queue, steps_left))
        state = json.loads(json.dumps(queue.state_dict()))
        queue, _, _ = make_queue(max_staleness)
        queue.load_state_dict(state)
        assert queue.state_dict() == state  # a run that is stopped again before its first step loses nothing
    assert found == expected


def test_a_run_that_is_resumed_with_steps_of_another_size_goes_back_to_the_first_batch_that_was_not_taken() -> None:
    queue, _, _ = make_queue(1)
    queue.load_state_dict({"place": 9, "size": 3, "ahead": [{"place": 3}]})
    assert queue.next(2)[0] == [3, 4]
