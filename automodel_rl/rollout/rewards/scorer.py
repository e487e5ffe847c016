"""Scores completions with reward functions that may fail, run too long or return nonsense."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.config import RewardConfig
from automodel_rl.rollout.rewards.functions import ANSWER
from automodel_rl.rollout.rewards.pool import Result, RewardPool


@dataclass(frozen=True)
class Score:
    """The rewards of one completion.

    Attributes:
        total: weighted sum of all rewards' scores; nan if the completion is left out.
        parts: each reward's score, in the order of the config; nan where a failed call leaves the completion out.
        errors: the error text of each reward's call that failed; empty if the call went well.
        metrics: further numbers that each reward returned, by name.
        answers: the answer of the completion that each reward has seen; None if it told none.
    """

    total: float
    parts: tuple[float, ...]
    errors: tuple[str, ...]
    metrics: tuple[dict[str, float], ...] = field(default=())
    answers: tuple[str | None, ...] = ()

    @property
    def is_left_out(self) -> bool:
        """Whether a failed call leaves the completion out, so that it has no reward."""
        return math.isnan(self.total)


@dataclass(frozen=True)
class Scoring:
    """A completion whose rewards are being computed.

    Attributes:
        completion, example: the completion, and the record of its prompt.
        results: the result of each reward; None for a reward that takes batches, which starts when scores are taken.
    """

    completion: str
    example: dict[str, Any]
    results: list["Future[list[Result]] | None"]

    def when_done(self, tell: Callable[[], None]) -> None:
        """Calls a function, from any thread, when the last of the results that have begun is there."""
        begun = [result for result in self.results if result is not None]
        left = itertools.count(len(begun) - 1, -1)  # its steps are atomic
        for result in begun:
            result.add_done_callback(lambda _: None if next(left) else tell())


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Starts every reward once with its options, to find errors before anything else starts.

    Raises:
        InputError: a reward cannot be started.
    """
    for reward in rewards:
        RewardPool(reward.model_copy(update={"workers": 1})).close()


class Scorer:
    """Runs each reward in processes of its own, and all of them at the same time.

    Args:
        rewards: the rewards of the config.
    """

    def __init__(self, rewards: Sequence[RewardConfig]):
        self.rewards = rewards
        self.pools = [RewardPool(config) for config in rewards]

    @property
    def takes_batches(self) -> bool:
        """Whether a reward scores completions together, once they are taken."""
        return any(pool.takes_batches for pool in self.pools)

    def submit(self, completion: str, example: Mapping[str, Any]) -> Scoring:
        """Begins to score a completion."""
        record = dict(example)
        results = [None if pool.takes_batches else pool.submit([completion], [record]) for pool in self.pools]
        return Scoring(completion, record, results)

    def take(self, scorings: Sequence[Scoring]) -> list[Score]:
        """The scores of completions that were submitted. Rewards that take batches get all of them, in one call for
        each of their processes."""
        by_reward = [
            self._together(pool, scorings)
            if pool.takes_batches
            else [result for scoring in scorings for result in _done(scoring.results[place])]
            for place, pool in enumerate(self.pools)
        ]
        of_completions = zip(*by_reward, strict=True) if by_reward else [()] * len(scorings)
        return [self._score(results) for results in of_completions]

    def _together(self, pool: RewardPool, scorings: Sequence[Scoring]) -> list[Result]:
        size = max(1, -(-len(scorings) // pool.config.workers))
        parts = [scorings[start : start + size] for start in range(0, len(scorings), size)]
        futures = [pool.submit([s.completion for s in part], [s.example for s in part]) for part in parts]
        return [result for future in futures for result in future.result()]

    def _score(self, results: Sequence[Result]) -> Score:
        errors = [
            f"{reward.function}: {result.error}" if result.error else ""
            for reward, result in zip(self.rewards, results, strict=True)
        ]
        pairs = [(reward.weight, result.score) for reward, result in zip(self.rewards, results, strict=True)]
        total = sum(weight * score for weight, score in pairs if weight)  # one of weight 0 leaves nothing out
        parts, answers = tuple(result.score for result in results), tuple(r.metrics.get(ANSWER) for r in results)
        metrics = tuple({name: value for name, value in r.metrics.items() if name != ANSWER} for r in results)
        return Score(total, parts, tuple(errors), metrics, answers)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


def _done(future: "Future[list[Result]] | None") -> list[Result]:
    assert future is not None
    return future.result()
