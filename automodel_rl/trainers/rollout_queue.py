"""A queue of batches of rewarded completions. Generators may be some batches ahead of training."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from automodel_rl.config import RolloutConfig
from automodel_rl.data.prompts import Prompt, PromptStream
from automodel_rl.rollout.collect import Pending, RolloutCollector
from automodel_rl.rollout.protocol import Rollout

Batch = tuple[Sequence[Prompt], list[list[Rollout]]]
"""Prompts, and the rewarded completions of each."""


class RolloutQueue:
    """Draws prompts and lets generators write. Every method is a collective.

    Args:
        prompts: the stream of prompts.
        rollouts: the collector, which asks the generators.
        config: the config's section `rollout`.
    """

    def __init__(self, prompts: PromptStream, rollouts: RolloutCollector, config: RolloutConfig):
        self.prompts, self.rollouts, self.config = prompts, rollouts, config
        self._ahead: deque[tuple[dict[str, int], list[Prompt], Pending]] = deque()

    def next(self, steps_left: int) -> Batch:
        """The next batch.

        Args:
            steps_left: number of batches that will still be taken, this one included.
        """
        while len(self._ahead) < min(self.config.max_staleness + 1, steps_left):
            before = self.prompts.state_dict()
            prompts = self.prompts.take(self.config.prompts)
            self._ahead.append((before, prompts, self._submit(prompts)))
        _, prompts, pending = self._ahead[0]
        rollouts = self.rollouts.take(pending)
        self._ahead.popleft()
        return prompts, rollouts

    def more(self, count: int) -> Batch:
        """A batch of `count` more prompts, written with the weights that generators have now."""
        prompts = self.prompts.take(count)
        return prompts, self.rollouts.take(self._submit(prompts))

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream of prompts, before the batches that are not taken yet."""
        return self._ahead[0][0] if self._ahead else self.prompts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a place. What generators are writing is ignored."""
        self._ahead.clear()
        self.prompts.load_state_dict(state)

    def _submit(self, prompts: Sequence[Prompt]) -> Pending:
        return self.rollouts.submit(prompts, self.config.group_size, self.config.sampling)
