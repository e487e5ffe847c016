"""What the generators are asked for."""

from types import SimpleNamespace
from typing import Any

from automodel_rl.rollout.collect import RolloutCollector


def test_every_completion_of_every_prompt_and_run_has_a_seed_of_its_own() -> None:
    def seed(run: int, number: int, sample: int) -> int:
        collector: Any = SimpleNamespace(config=SimpleNamespace(seed=run))
        prompt: Any = SimpleNamespace(number=number)
        return RolloutCollector._seed(collector, prompt, sample)

    places = [(run, number, sample) for run in range(3) for number in range(20) for sample in range(8)]
    assert len({seed(*place) for place in places}) == len(places)
    assert seed(1, 2, 3) == seed(1, 2, 3)
