"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438), row by row on the host."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.config.critic import GAEConfig


def gae(rewards: Tensor, values: Tensor, mask: Tensor, config: GAEConfig) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a row's tokens. A step that follows the last one has the value 0, also where a
    completion was cut off.

    Args:
        rewards: the reward of each token, [n].
        values: the value of the state in which each token was chosen, [n].
        mask: the tokens that the model wrote, bool [n]; others are passed over.
        config: the estimate.

    Returns:
        Two tensors [n], float64; 0 for tokens that the model did not write. Advantages are not whitened.
    """
    steps = _steps(mask, config.level)
    of_steps = [float(rewards[step].double().sum()) for step in steps]
    before = [float(values[step[0]]) for step in steps]
    policy_lambda = config.gae_lambda
    if config.length_adaptive is not None:
        policy_lambda = max(0.0, 1 - 1 / max(config.length_adaptive * int(mask.sum()), 1e-300))
    critic_lambda = config.gae_lambda if config.critic_lambda is None else config.critic_lambda
    advantages, returns = torch.zeros(len(mask), dtype=torch.float64), torch.zeros(len(mask), dtype=torch.float64)
    by_policy = _estimates(of_steps, before, config.discount, policy_lambda)
    by_critic = _estimates(of_steps, before, config.discount, critic_lambda)
    for step, own, advantage, value in zip(steps, by_policy, by_critic, before, strict=True):
        advantages[step], returns[step] = own, advantage + value
    return advantages, returns


def whitened(advantages: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Advantages of rows, [n] each, less their mean and divided by their sample standard deviation over all counted
    tokens of all rows; 0 for the others.

    Args:
        advantages: float64 [n] for each row.
        masks: the tokens that count, bool [n] for each row.
    """
    counted = torch.cat([of_row[mask] for of_row, mask in zip(advantages, masks, strict=True)])
    if len(counted) < 2:
        return [*advantages]
    mean, deviation = counted.mean(), counted.std()
    return [
        torch.where(mask, (of_row - mean) / (deviation + 1e-8), 0.0)
        for of_row, mask in zip(advantages, masks, strict=True)
    ]


def _steps(mask: Tensor, level: str) -> list[list[int]]:
    """The places of each step's tokens."""
    places = mask.nonzero()[:, 0].tolist()
    if level == "token":
        return [[place] for place in places]
    numbered = itertools.groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])  # equal within a turn
    return [[place for _, place in turn] for _, turn in numbered]


def _estimates(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    """Advantages of steps: the sum of later errors of the values, which fade by discount * decay."""
    found, advantage, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + discount * following - value + discount * decay * advantage
        following = value
        found.append(advantage)
    return found[::-1]
