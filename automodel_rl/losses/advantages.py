"""Advantages of completions from their rewards, group by group."""

from torch import Tensor

from automodel_rl.config.losses import AdvantageConfig

EPSILON = 1e-6
"""Added to standard deviations."""


def advantages(rewards: Tensor, config: AdvantageConfig) -> Tensor:
    """Advantages: how much better each completion is than what it is compared with. Papers are in `AdvantageConfig`.

    Args:
        rewards: [P, G], the rewards of G completions for each of P prompts. Standard deviations are those of samples
            (divided by the number less 1).
        config: what a completion is compared with.

    Returns:
        [P, G], of the same dtype.
    """
    group_size = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    if config.kind == "grpo":
        result = centred / (rewards.std(1, keepdim=True, correction=min(1, group_size - 1)) + EPSILON)
    elif config.kind == "dr_grpo":
        result = centred
    elif config.kind == "rloo":
        result = centred * (group_size / max(1, group_size - 1))
    else:
        result = centred / (centred.std(correction=min(1, centred.numel() - 1)) + EPSILON)
    return result if config.clip is None else result.clamp(-config.clip, config.clip)


def has_signal(rewards: Tensor) -> Tensor:
    """Whether the rewards [P, G] of each group differ, bool [P]. If they do not, nothing can be learned from it."""
    return rewards.amax(1) > rewards.amin(1)


def overlong_penalty(num_tokens: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Penalty for completions that come close to the limit, from 0 to 1 (DAPO, arXiv:2503.14476, eq. 13).

    It is subtracted from the reward and rises over the last `buffer` tokens before the limit.

    Args:
        num_tokens: lengths of completions, any shape.
        max_tokens: length of the longest completion.
        buffer: number of tokens over which the penalty rises.
    """
    return ((num_tokens - (max_tokens - buffer)) / buffer).clamp(0, 1)
