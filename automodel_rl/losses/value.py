"""The critic's loss."""

import torch

from automodel_rl.batch import Microbatch
from automodel_rl.losses.outputs import LossOutput, TokenOutputs

RETURNS, OLD_VALUES = "returns", "old_values"
"""Names of values: the critic's targets, and its outputs before the step, [T]."""

MOMENTS = ("critic/return", "critic/return_square", "critic/error", "critic/error_square")
"""Metrics from which `explained_variance` is computed, over all microbatches and ranks."""


def value_loss(outputs: TokenOutputs, microbatch: Microbatch, clip: float | None) -> LossOutput:
    """Computes half the squared error of values, with values clipped to within `clip` of those before the step
    (Schulman et al., arXiv:1506.02438; Engstrom et al., arXiv:2005.12729, section 3).

    Args:
        outputs: scores, read with `Readout(scores=True)`. The score at the position that predicts a token is the value
            of the state in which the token was chosen.
        microbatch: `values` has `returns` and `old_values`.
        clip: clipping range; None for no clipping.

    Returns:
        A sum over tokens, float64. Metrics, as means over tokens: critic/clip_fraction, critic/value and `MOMENTS`.

    Raises:
        ValueError: there are no scores.

    Example:
        >>> import torch
        >>> values = {"returns": torch.tensor([0.0, 0.0, 1.0]), "old_values": torch.tensor([0.0, 0.0, 0.5])}
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, False, True]), values)
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> scores = torch.tensor([[0.0], [0.9], [0.0]])  # 0.9 before the last token, clipped to 0.7
        >>> round(value_loss(TokenOutputs(torch.zeros(0), scores=scores), microbatch, 0.2).sums["tokens"].item(), 4)
        0.045
    """
    if outputs.scores is None:
        raise ValueError("value_loss needs the scores of a linear head: read them with Readout(scores=True)")
    values = outputs.scores[:, 0].double()
    returns, old = (microbatch.values[name].double() for name in (RETURNS, OLD_VALUES))
    error = (values - returns).square()
    worst = error
    if clip is not None:
        worst = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    counted = microbatch.loss_mask
    per_token = {
        "critic/clip_fraction": (worst > error).to(error.dtype),
        "critic/value": values,
        **dict(zip(MOMENTS, (returns, returns.square(), returns - values, error), strict=True)),
    }
    count = counted.sum()
    metrics = {name: (torch.where(counted, v.detach(), 0.0).sum(), count) for name, v in per_token.items()}
    return LossOutput({"tokens": 0.5 * torch.where(counted, worst, 0.0).sum()}, metrics)


def explained_variance(metrics: dict[str, float]) -> float:
    """Computes the fraction of the returns' variance explained by the values, from the metrics of `value_loss`; 0 if
    returns do not vary."""
    mean, square, error, error_square = (metrics[name] for name in MOMENTS)
    variance = square - mean * mean
    return 1 - (error_square - error * error) / variance if variance > 1e-12 else 0.0
