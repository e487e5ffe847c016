"""Scores completions with reward functions that may fail, time out or return nonsense."""

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
    """Rewards of one completion.

    Attributes:
        total: weighted sum; nan if the completion is excluded.
        parts: each reward's score; nan where a failed call excludes the completion.
        errors: each reward's error; empty on success.
        metrics: further numbers of each reward.
        answers: the completion's answer as reported by each reward.
    """

    total: float
    parts: tuple[float, ...]
    errors: tuple[str, ...]
    metrics: tuple[dict[str, float], ...] = field(default=())
    answers: tuple[str | None, ...] = ()

    @property
    def is_excluded(self) -> bool:
        return math.isnan(self.total)


@dataclass(frozen=True)
class Scoring:
    """A completion whose rewards are being computed.

    Attributes:
        results: of each reward; None for a reward that takes batches, which starts in `Scorer.take`.
    """

    completion: str
    example: dict[str, Any]
    results: list["Future[list[Result]] | None"]

    def add_done_callback(self, tell: Callable[[], None]) -> None:
        """Calls `tell`, in any thread, once all started results are available."""
        begun = [result for result in self.results if result is not None]
        left = itertools.count(len(begun) - 1, -1)  # next() is atomic
        for result in begun:
            result.add_done_callback(lambda _: None if next(left) else tell())


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Starts every reward once, to find errors early. Raises InputError if one does not start."""
    for reward in rewards:
        RewardPool(reward.model_copy(update={"workers": 1})).close()


class Scorer:
    """Runs all rewards of a config concurrently, each in its own processes."""

    def __init__(self, rewards: Sequence[RewardConfig]):
        self.rewards = rewards
        self.pools = [RewardPool(config) for config in rewards]

    @property
    def takes_batches(self) -> bool:
        return any(pool.takes_batches for pool in self.pools)

    def submit(self, completion: str, example: Mapping[str, Any]) -> Scoring:
        record = dict(example)
        results = [None if pool.takes_batches else pool.submit([completion], [record]) for pool in self.pools]
        return Scoring(completion, record, results)

    def take(self, scorings: Sequence[Scoring]) -> list[Score]:
        """Waits for the scores of completions. Rewards that take batches get all of them, in one call per process."""
        by_reward = [
            self._score_batch(pool, scorings)
            if pool.takes_batches
            else [result for scoring in scorings for result in _done(scoring.results[place])]
            for place, pool in enumerate(self.pools)
        ]
        of_completions = zip(*by_reward, strict=True) if by_reward else [()] * len(scorings)
        return [self._score(results) for results in of_completions]

    def _score_batch(self, pool: RewardPool, scorings: Sequence[Scoring]) -> list[Result]:
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
        total = sum(weight * score for weight, score in pairs if weight)  # weight 0 excludes nothing
        parts, answers = tuple(result.score for result in results), tuple(r.metrics.get(ANSWER) for r in results)
        metrics = tuple({name: value for name, value in r.metrics.items() if name != ANSWER} for r in results)
        return Score(total, parts, tuple(errors), metrics, answers)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


def _done(future: "Future[list[Result]] | None") -> list[Result]:
    assert future is not None
    return future.result()
