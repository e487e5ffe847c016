"""Queue of batches of rewarded completions. Generators may be some batches ahead of training."""

from collections import deque
from typing import Any

from automodel_rl.data.prompts import Prompt, PromptStream
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rollouts import Rollouts

Taken = tuple[list[Prompt], list[list[Rollout]]]
"""Prompts, and the rewarded completions of each."""


class RolloutQueue:
    """Draws prompts and submits them to the generators."""

    def __init__(self, prompts: PromptStream, rollouts: Rollouts):
        self.prompts, self.rollouts, self.config = prompts, rollouts, rollouts.config.rollout
        self._in_flight: deque[tuple[dict[str, int], list[Prompt], int]] = deque()
        self._to_regenerate: deque[dict[str, int]] = (
            deque()
        )  # positions of batches that were unfinished at the last stop

    def next(self, steps_left: int) -> Taken:
        """Returns the next batch. `steps_left` is the number of batches still to be taken, including this one."""
        while len(self._in_flight) < min(self.config.max_staleness + 1, steps_left):
            before, prompts = self._draw()
            self._in_flight.append((before, prompts, self._submit(prompts)))
        _, prompts, number = self._in_flight[0]
        rollouts = self._take(number)
        self._in_flight.popleft()
        return prompts, rollouts

    def more(self, count: int) -> Taken:
        """Returns a batch of `count` additional prompts, completed with the generators' current weights."""
        prompts = self.prompts.take(count)
        return prompts, self._take(self._submit(prompts))

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompt stream, plus `ahead`, the positions of batches not taken yet, and their `size`.
        Prompts of `more` come after those batches, so one position alone would not tell which were drawn."""
        ahead = [*(before for before, _, _ in self._in_flight), *self._to_regenerate]
        return {**self.prompts.state_dict(), "size": self.config.prompts, "ahead": ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a position. Completions in progress are discarded and generated again.

        If the batch size has changed, prompts continue from the first batch that was not taken.
        """
        self._in_flight.clear()
        ahead = state.get("ahead", [])
        is_same = state.get("size") == self.config.prompts
        self._to_regenerate = deque(ahead if is_same else [])
        self.prompts.load_state_dict(state if is_same or not ahead else ahead[0])

    def _draw(self) -> tuple[dict[str, int], list[Prompt]]:
        """Returns the prompts of the next batch, and their position in the stream."""
        now = self.prompts.state_dict()
        if not self._to_regenerate:
            return now, self.prompts.take(self.config.prompts)
        before = self._to_regenerate.popleft()
        self.prompts.load_state_dict(before)
        prompts = self.prompts.take(self.config.prompts)
        self.prompts.load_state_dict(now)
        return before, prompts

    def _submit(self, prompts: list[Prompt]) -> int:
        return self.rollouts.submit(prompts, self.config.group_size, self.config.sampling, keeps_routes=True)

    def _take(self, number: int) -> list[list[Rollout]]:
        return self.rollouts.take(number)
