"""Generalised advantage estimation (Schulman et al., arXiv:1506.02438), one row at a time on the host."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.config.critic import GAEConfig


def gae(rewards: Tensor, values: Tensor, mask: Tensor, config: GAEConfig) -> tuple[Tensor, Tensor]:
    """Computes advantages, not whitened, and returns, float64 [n] each; 0 outside the mask. The value after the last
    step is 0, even if the completion was truncated.

    Args:
        rewards: reward of each token, [n].
        values: value of the state in which each token was chosen, [n].
        mask: bool [n], the generated tokens; others are skipped.
        config: settings.
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
    """Normalises advantages to mean 0 and standard deviation 1 over the tokens in the masks of all rows. Returns 0 for
    all other tokens."""
    counted = torch.cat([of_row[mask] for of_row, mask in zip(advantages, masks, strict=True)])
    if len(counted) < 2:
        return [*advantages]
    mean, deviation = counted.mean(), counted.std()
    return [
        torch.where(mask, (of_row - mean) / (deviation + 1e-8), 0.0)
        for of_row, mask in zip(advantages, masks, strict=True)
    ]


def _steps(mask: Tensor, level: str) -> list[list[int]]:
    """Returns the token indices of each step."""
    places = mask.nonzero()[:, 0].tolist()
    if level == "token":
        return [[place] for place in places]
    numbered = itertools.groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])  # equal within a turn
    return [[place for _, place in turn] for _, turn in numbered]


def _estimates(rewards: Sequence[float], values: Sequence[float], discount: float, decay: float) -> list[float]:
    """Computes advantages of steps: the sum of later TD errors, discounted by discount * decay."""
    found, advantage, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + discount * following - value + discount * decay * advantage
        following = value
        found.append(advantage)
    return found[::-1]
