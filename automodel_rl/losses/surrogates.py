"""Surrogates: per-token losses whose gradient is a policy gradient. See `PolicyLossConfig` for formulas and papers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, spread_over_tokens, sum_by_sequence
from automodel_rl.config.losses import PolicyLossConfig
from automodel_rl.losses.terms import binary_divergence, mean_by_sequence, pessimistic_ratio

HIGHEST_RATIO = 20.0
"""Bound of ratios in dppo."""

LARGEST_LOG = 20.0
"""Bound of log-ratios of tokens and sequences in vespo, and of tokens in sapo."""

MIN_PRODUCT = 1e-8
"""Minimum product of ratios in vespo."""

SHAPES = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}
"""k and l of vespo, by the sign of the advantage."""


@dataclass(frozen=True)
class Ratios:
    """Inputs of surrogates, tensors [T].

    Attributes:
        logprobs: log-probabilities under the policy.
        old: log-probabilities under the old policy.
        log_ratio: log-ratio with gradient; 0 for tokens that do not count.
        weight: correction weights; None without a correction.
    """

    logprobs: Tensor
    old: Tensor
    log_ratio: Tensor
    advantages: Tensor
    weight: Tensor | None
    microbatch: Microbatch

    @property
    def weighted(self) -> Tensor:
        """Advantages times correction weights."""
        return self.advantages if self.weight is None else self.advantages * self.weight


def _clip(ratios: Ratios, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    _, is_clipped = pessimistic_ratio(ratios.log_ratio.detach(), ratios.advantages, low, high, config.dual_clip)
    # With the weighted advantage, a token of weight 0 has no loss, even if its ratio is infinite.
    ratio, _ = pessimistic_ratio(ratios.log_ratio, ratios.weighted, low, high, config.dual_clip)
    return -ratios.weighted * ratio, is_clipped


def _cispo(ratios: Ratios, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    ratio = ratios.log_ratio.detach().exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -ratios.weighted * clipped * ratios.logprobs, ratio != clipped


def _sapo(ratios: Ratios, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    positive, negative = config.soft_temperatures
    temperature = torch.where(ratios.advantages > 0, positive, torch.full_like(ratios.advantages, negative))
    ratio = ratios.log_ratio.clamp_max(LARGEST_LOG).exp()
    soft = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -ratios.weighted * soft, torch.zeros_like(ratio, dtype=torch.bool)


def _vespo(ratios: Ratios, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    log_ratio = ratios.log_ratio.detach().clamp(-LARGEST_LOG, LARGEST_LOG)
    if ratios.weight is not None:
        log_ratio = log_ratio + torch.where(ratios.microbatch.loss_mask, ratios.weight.log(), 0.0)
    total = sum_by_sequence(log_ratio, ratios.microbatch).clamp(math.log(MIN_PRODUCT), LARGEST_LOG)
    product = spread_over_tokens(total, ratios.microbatch)
    is_positive = ratios.advantages >= 0
    k, factor = (
        torch.where(is_positive, positive, torch.full_like(product, negative))
        for positive, negative in zip(SHAPES["positive"], SHAPES["negative"], strict=True)
    )
    shape = (factor + k * product - factor * product.exp()).exp()
    return -shape * ratios.advantages * ratios.logprobs, torch.zeros_like(is_positive)


def _gmpo(ratios: Ratios, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    clipped = ratios.log_ratio.clamp(-config.clip_low, config.clip_high)
    higher, lower = torch.maximum(ratios.log_ratio, clipped), torch.minimum(ratios.log_ratio, clipped)
    one_sided = torch.where(ratios.advantages < 0, higher, lower)
    mean = spread_over_tokens(mean_by_sequence(one_sided, ratios.microbatch), ratios.microbatch)
    return -ratios.weighted * mean.exp(), (one_sided != ratios.log_ratio).detach()


def _dppo(ratios: Ratios, config: PolicyLossConfig, *, by_divergence: bool) -> tuple[Tensor, Tensor]:
    counted = ratios.microbatch.loss_mask
    now, old = (torch.where(counted, one.detach(), 0.0) for one in (ratios.logprobs, ratios.old))
    rise = now.exp() - old.exp()
    moved = binary_divergence(old, now) if by_divergence else rise.abs()
    too_high = (ratios.advantages > 0) & (rise > 0) & (moved > config.clip_high)
    too_low = (ratios.advantages < 0) & (rise < 0) & (moved > config.clip_low)
    is_clipped = too_high | too_low
    ratio = torch.where(is_clipped, 0.0, ratios.log_ratio.detach().exp().clamp_max(HIGHEST_RATIO))
    return -ratios.weighted * ratio * ratios.logprobs, is_clipped


Surrogate = Callable[[Ratios, PolicyLossConfig], tuple[Tensor, Tensor]]
"""Returns each token's loss times its weight, and whether its ratio was clipped; both [T]."""

SURROGATES: dict[str, Surrogate] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "gmpo": _gmpo,
    "dppo_tv": lambda ratios, config: _dppo(ratios, config, by_divergence=False),
    "dppo_kl": lambda ratios, config: _dppo(ratios, config, by_divergence=True),
}
"""The surrogates of `PolicyLossConfig`."""
