"""Losses whose inputs are supplied with the data, one per token. They are undivided sums over tokens.

Names and formulas follow Tinker's API (tinker-docs.thinkingmachines.ai/losses). With lp the log-probability of a target
under the model, q its `logprobs` as it was sampled, A its `advantages` and r = exp(lp - q):

    cross_entropy        -weights * lp
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r, low, high) * A), low 0.8 and high 1.2 by default (arXiv:1707.06347)
    cispo                -clip(r, low, high) * lp * A, without a gradient of the ratio, low 0 and high 4
                         (arXiv:2506.13585)
    dro                  -(lp * A - beta / 2 * (lp - q)^2), beta has no default (arXiv:2405.19107)

A token whose weight or advantage is 0 has no effect, except in dro.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.losses.outputs import LinearLoss, LossFn, LossOutput, TokenOutputs
from automodel_rl.losses.terms import pessimistic_ratio

Settings = Mapping[str, float]
"""Settings of a loss by name."""


@dataclass(frozen=True)
class TokenLoss:
    """A loss of the list above.

    Attributes:
        inputs: names of the tensors in `Microbatch.values` that it reads.
        settings: names of its settings with defaults; None if required.
        make: builds the loss from complete settings.
    """

    inputs: tuple[str, ...]
    settings: dict[str, float | None]
    make: Callable[[Settings], LossFn]


def token_loss(name: str, settings: Settings) -> LossFn:
    """Returns one of the losses above. Its sum is over positions; count with `UNDIVIDED` to leave it undivided.

    Args:
        name: a key of `TOKEN_LOSSES`.
        settings: settings that differ from the defaults.

    Raises:
        ValueError: an unknown loss or setting, or a missing required setting.

    Example:
        >>> import torch
        >>> values = {"weights": torch.tensor([0.0, 1.0, 0.5])}
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.ones(3, dtype=torch.bool), values)
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> outputs = TokenOutputs(torch.tensor([-0.5, -1.5, 0.0]))
        >>> token_loss("cross_entropy", {})(outputs, microbatch).sums["positions"].item()
        1.25
    """
    if name not in TOKEN_LOSSES:
        raise ValueError(f"unknown loss {name!r}: use one of {', '.join(TOKEN_LOSSES)}")
    found = TOKEN_LOSSES[name]
    unknown = settings.keys() - found.settings.keys()
    if unknown:
        known = ", ".join(found.settings) or "none"
        raise ValueError(f"the loss {name} has no setting {min(unknown)!r}: it has {known}")
    given = {**found.settings, **settings}
    lacks = next((key for key, value in given.items() if value is None), None)
    if lacks is not None:
        raise ValueError(f"the loss {name} needs the setting {lacks}: set it to a number")
    return found.make({key: value for key, value in given.items() if value is not None})


def _negative_weights(microbatch: Microbatch) -> Tensor:
    return -microbatch.values["weights"]


def _of_ratio(
    outputs: TokenOutputs, microbatch: Microbatch, loss: Callable[..., Tensor], settings: Settings
) -> LossOutput:
    dtype = outputs.logprobs.dtype
    sampled, advantages = (microbatch.values[key].to(dtype) for key in ("logprobs", "advantages"))
    per_token = loss(outputs.logprobs, sampled, advantages, **settings)
    return LossOutput({"positions": torch.where(microbatch.loss_mask, per_token, 0.0).sum()})


def _counted_ratio(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """Returns the ratio where the advantage is not 0, and 1 elsewhere, where an overflow would make gradients nan."""
    return torch.where(advantages == 0, 0.0, logprobs - sampled).exp()


def _importance_sampling(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    return -_counted_ratio(logprobs, sampled, advantages) * advantages


def _ppo(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, clip_low_threshold: float, clip_high_threshold: float
) -> Tensor:
    log_ratio = torch.where(advantages == 0, 0.0, logprobs - sampled)
    ratio, _ = pessimistic_ratio(log_ratio, advantages, clip_low_threshold, clip_high_threshold)
    return -ratio * advantages


def _cispo(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, clip_low_threshold: float, clip_high_threshold: float
) -> Tensor:
    ratio = _counted_ratio(logprobs.detach(), sampled, advantages)
    return -ratio.clamp(clip_low_threshold, clip_high_threshold) * logprobs * advantages


def _dro(logprobs: Tensor, sampled: Tensor, advantages: Tensor, beta: float) -> Tensor:
    return -(logprobs * advantages - beta / 2 * (logprobs - sampled).square())


def _with_ratio(loss: Callable[..., Tensor], **settings: float | None) -> TokenLoss:
    def make(given: Settings) -> LossFn:
        return functools.partial(_of_ratio, loss=loss, settings=given)

    return TokenLoss(("logprobs", "advantages"), settings, make)


TOKEN_LOSSES = {
    "cross_entropy": TokenLoss(("weights",), {}, lambda _: LinearLoss(_negative_weights, "positions")),
    "importance_sampling": _with_ratio(_importance_sampling),
    "ppo": _with_ratio(_ppo, clip_low_threshold=0.8, clip_high_threshold=1.2),
    "cispo": _with_ratio(_cispo, clip_low_threshold=0.0, clip_high_threshold=4.0),
    "dro": _with_ratio(_dro, beta=None),
}
