"""Advantages of completions from their rewards, group by group."""

from torch import Tensor

from automodel_rl.config.losses import AdvantageConfig

EPSILON = 1e-6
"""Added to standard deviations."""


def advantages(rewards: Tensor, config: AdvantageConfig) -> Tensor:
    """How much better each completion is than what it is compared with; papers are with `AdvantageConfig`.

    Args:
        rewards: [P, G], of G completions for each of P prompts. Standard deviations are those of samples (G - 1).
        config: what they are compared with.

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
    """Which groups [P, G] have rewards that differ, bool [P]; from the others nothing can be learned."""
    return rewards.amax(1) > rewards.amin(1)


def overlong_penalty(num_tokens: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """What is taken off a reward for the last `buffer` tokens before the limit, from 0 to 1 (DAPO, arXiv:2503.14476,
    eq. 13).

    Args:
        num_tokens: of completions, any shape.
        max_tokens: longest completion.
        buffer: over how many tokens the penalty rises.
    """
    return ((num_tokens - (max_tokens - buffer)) / buffer).clamp(0, 1)
