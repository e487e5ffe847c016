"""Log-probabilities of targets from hidden states, a chunk of tokens at a time: [T, V] never exists.

Shape letters: T tokens, H hidden, V vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch import PackedBatch

CHUNK = 512
"""Tokens whose logits exist at once: 512 x 152k x 4 bytes is 0.3 GiB."""


def target_logprobs(hidden: Tensor, weight: Tensor, batch: PackedBatch) -> Tensor:
    """log p(target) under softmax(hidden @ weight.T), 0 where there is no target.

    Args:
        hidden: final hidden states [T, H].
        weight: head weight [V, H].
        batch: the row; its `targets` are scored.

    Returns:
        [T], float64 for float64 hidden states, else float32.
    """
    return _TargetLogprobs.apply(hidden, weight, batch.targets)


class _TargetLogprobs(torch.autograd.Function):
    """Keeps the log-sum-exp of every token and recomputes each chunk's logits in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        accurate = _accurate(hidden.dtype)
        logprobs = torch.empty(targets.shape, dtype=accurate, device=hidden.device)
        logsumexp = torch.empty_like(logprobs)
        for chunk in _chunks(len(targets)):
            picked, logsumexp[chunk] = _score(hidden[chunk], weight, targets[chunk])
            logprobs[chunk] = torch.where(targets[chunk] >= 0, picked - logsumexp[chunk], 0.0)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        gradient = torch.where(targets >= 0, gradients[0], 0.0)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=_accurate(weight.dtype), device=weight.device)
        for chunk in _chunks(len(targets)):
            d_logits = _logits_gradient(hidden[chunk], weight, targets[chunk], logsumexp[chunk], gradient[chunk])
            d_hidden[chunk] = d_logits @ weight
            _add_matmul(d_weight, d_logits.t(), hidden[chunk])
            del d_logits  # before the next chunk's
        return d_hidden, d_weight.to(weight.dtype), None


def _score(hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Logit of every target and log-sum-exp of all logits, both [C]. In place: one [C, V] buffer is all there is."""
    logits_CV = _logits(hidden_CH, weight_VH)
    picked_C = logits_CV.gather(1, targets_C.clamp_min(0)[:, None])[:, 0]
    largest_C = logits_CV.amax(1)
    return picked_C, logits_CV.sub_(largest_C[:, None]).exp_().sum(1).log_().add_(largest_C)


def _logits_gradient(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, logsumexp_C: Tensor, gradient_C: Tensor
) -> Tensor:
    """[C, V] in the weight's dtype: d log p(target) / d logits is one-hot(target) - softmax."""
    d_logits_CV = _logits(hidden_CH, weight_VH).sub_(logsumexp_C[:, None]).exp_().mul_(-gradient_C[:, None])
    d_logits_CV.scatter_add_(1, targets_C.clamp_min(0)[:, None], gradient_C[:, None])
    return d_logits_CV.to(weight_VH.dtype)


def top_logits(hidden: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of every token and their ids, both [T, k], largest first. No gradient."""
    pieces = [_logits(hidden[chunk], weight).topk(k, dim=1) for chunk in _chunks(len(hidden))]
    return torch.cat([piece.values for piece in pieces]), torch.cat([piece.indices for piece in pieces])


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, num_tokens, CHUNK)]


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    return _accurate_matmul(hidden_CH, weight_VH.t())


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a product of its own where the dtypes allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _accurate_matmul(a, b)


def _accurate_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in at least fp32. On CUDA the product of 16-bit matrices leaves the tensor cores unrounded."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(_accurate(a.dtype))
