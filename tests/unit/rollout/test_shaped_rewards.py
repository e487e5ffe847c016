"""Rewards to learn from: what scores become before completions are compared."""

import pytest

from automodel_rl.config import FilterConfig
from automodel_rl.generators.protocol import Completion, Conversation
from automodel_rl.rollout import groups
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.scorer import Score


def rollout_of(total: float, *turns: int, suffix: int = 9) -> Rollout:
    """A completion of turns of so many tokens, with a suffix between them."""
    sampled = [is_sampled for turn in turns for is_sampled in [False] * suffix + [True] * turn][suffix:]
    conversation = Conversation([1], sampled) if len(turns) > 1 else None
    completion = Completion([5] * len(sampled), [0.0] * len(sampled), "stop", conversation=conversation)
    return Rollout(completion, "", Score(total, (total,), ("",)))


def test_the_overlong_penalty_is_by_the_tokens_of_the_last_turn() -> None:
    config = FilterConfig(overlong_buffer=4, overlong_penalty=2.0)
    lengths = [(6,), (7,), (10,), (10, 6), (3, 7), (8, 3, 8), (2, 10), (10, 10, 1)]
    rewards = groups.shaped_rewards([rollout_of(1.0, *turns) for turns in lengths], config, max_new_tokens=10)
    assert rewards.tolist() == [1.0, 0.5, -1.0, 1.0, 0.5, 0.0, -1.0, 1.0]


def test_rewards_are_scaled_and_the_penalty_is_not() -> None:
    rollouts = [rollout_of(0.5, 2), rollout_of(0.25, 8)]
    assert groups.shaped_rewards(rollouts, FilterConfig(reward_scale=8.0), 10).tolist() == [4.0, 2.0]
    config = FilterConfig(reward_scale=8.0, overlong_buffer=4, overlong_penalty=3.0)
    assert groups.shaped_rewards(rollouts, config, 10).tolist() == pytest.approx([4.0, 0.5])
