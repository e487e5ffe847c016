"""Scores completions with reward functions that may fail, run too long or return nonsense."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_rl.config import RewardConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.child_process import ChildEndedError, ChildProcess

START_SECONDS = 120.0
"""Time limit for importing a reward function's module."""


@dataclass(frozen=True)
class Score:
    """The rewards of one completion.

    Attributes:
        total: weighted sum of all rewards' scores.
        parts: each reward's score, in the order of the config.
        errors: the error text of each reward's call, which then scored `on_error`; empty if the call went well.
    """

    total: float
    parts: tuple[float, ...]
    errors: tuple[str, ...]


def check_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Starts every reward once with its options, to find errors before anything else starts.

    Raises:
        InputError: a reward cannot be started.
    """
    for reward in rewards:
        Scorer([reward]).close()


class Scorer:
    """Runs each reward in a process of its own. After a call that runs out of time, the process is started anew.

    Args:
        rewards: the rewards of the config.
    """

    def __init__(self, rewards: Sequence[RewardConfig]):
        self.rewards = [_Reward(config) for config in rewards]

    def __call__(self, completion: str, example: Mapping[str, Any]) -> Score:
        parts, errors = [], []
        for reward in self.rewards:
            score, error = reward(completion, example)
            parts.append(score)
            errors.append(f"{reward.config.function}: {error}" if error else "")
        weights = [reward.config.weight for reward in self.rewards]
        return Score(sum(w * p for w, p in zip(weights, parts, strict=True)), tuple(parts), tuple(errors))

    def close(self) -> None:
        for reward in self.rewards:
            reward.stop()


class _Reward:
    def __init__(self, config: RewardConfig):
        self.config = config
        self.child: ChildProcess | None = None
        self._start()

    def __call__(self, completion: str, example: Mapping[str, Any]) -> tuple[float, str]:
        """The score and an error text, which is empty if the call went well."""
        try:
            child = self.child or self._start()
            child.send((completion, dict(example)))
            score, error = child.receive(self.config.time_limit)
        except TimeoutError:
            self.stop()
            return self.config.on_error, f"took longer than time_limit={self.config.time_limit} s"
        except (ChildEndedError, InputError) as problem:
            self.stop()
            return self.config.on_error, str(problem)
        return (self.config.on_error, error) if score is None else (score, "")

    def _start(self) -> ChildProcess:
        name = self.config.function
        self.child = ChildProcess([sys.executable, "-m", "automodel_rl.rollout.rewards.worker", name])
        try:
            self.child.send(self.config.options)
            _, error = self.child.receive(START_SECONDS)
        except (ChildEndedError, TimeoutError):
            error = f"rewards.function={name}: its process does not start: import it to see why"
        if error:
            self.stop()
            raise InputError(error)
        return self.child

    def stop(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None
