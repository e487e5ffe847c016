"""Log-probabilities of targets from hidden states, a chunk of tokens at a time: [T, V] never exists.

Shape letters: T tokens, H hidden, V vocabulary (this rank's part of it under tensor parallelism), C tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import LocalRow
from automodel_rl.parallel.collectives import all_gather

CHUNK = 512
"""Tokens whose logits exist at once: 512 x 152k x 4 bytes is 0.3 GiB."""


@dataclass(frozen=True)
class Head:
    """The output projection as one rank holds it.

    Attributes:
        weight: [V, H].
        softcap: logits are softcap * tanh(logits / softcap), if not None.
        tp_group: the ranks that hold the other parts of the vocabulary, in order of rank.
    """

    weight: Tensor
    softcap: float | None = None
    tp_group: dist.ProcessGroup | None = None

    @property
    def first_token(self) -> int:
        """Token id of the weight's first row."""
        return 0 if self.tp_group is None else self.tp_group.rank() * len(self.weight)


def target_logprobs(hidden: Tensor, head: Head, row: LocalRow) -> Tensor:
    """log p(target) under softmax(hidden @ weight.T), 0 where there is no target.

    Args:
        hidden: final hidden states [T, H]. Under tensor parallelism its gradient is this rank's summand.
        head: the output projection.
        row: its `targets` are scored.

    Returns:
        [T], float64 for float64 hidden states, else float32; equal on all tp ranks.
    """
    return _TargetLogprobs.apply(hidden, head.weight, row.targets, head)


class _TargetLogprobs(torch.autograd.Function):
    """Keeps the log-sum-exp of every token and recomputes each chunk's logits in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        accurate = _accurate(hidden.dtype)
        picked = torch.empty(targets.shape, dtype=accurate, device=hidden.device)
        logsumexp = torch.empty_like(picked)
        places = targets - head.first_token
        for chunk in _chunks(len(targets)):
            picked[chunk], logsumexp[chunk] = _score(hidden[chunk], weight, places[chunk], head.softcap)
        if head.tp_group is not None:
            picked, logsumexp = _over_vocabulary(picked, logsumexp, head.tp_group)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.softcap, ctx.first_token = head.softcap, head.first_token
        return torch.where(targets >= 0, picked - logsumexp, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        gradient = torch.where(targets >= 0, gradients[0], 0.0)
        places = targets - ctx.first_token
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=_accurate(weight.dtype), device=weight.device)
        for chunk in _chunks(len(targets)):
            d_logits = _logits_gradient(
                hidden[chunk], weight, places[chunk], logsumexp[chunk], gradient[chunk], ctx.softcap
            )
            d_hidden[chunk] = d_logits @ weight
            _add_matmul(d_weight, d_logits.t(), hidden[chunk])
            del d_logits  # before the next chunk's
        return d_hidden, d_weight.to(weight.dtype), None, None


def _score(hidden_CH: Tensor, weight_VH: Tensor, places_C: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Logit of every target (0 if it is not in this part) and log-sum-exp of all logits, both [C].

    In place: one [C, V] buffer is all there is.
    """
    logits_CV = _logits(hidden_CH, weight_VH, softcap)
    inside_C = _inside(places_C, weight_VH)
    picked_C = logits_CV.gather(1, places_C.where(inside_C, 0)[:, None])[:, 0].where(inside_C, 0.0)
    largest_C = logits_CV.amax(1)
    return picked_C, logits_CV.sub_(largest_C[:, None]).exp_().sum(1).log_().add_(largest_C)


def _over_vocabulary(picked: Tensor, logsumexp: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The same two over the parts of all tp ranks, in one collective."""
    parts = all_gather(torch.stack([picked, logsumexp]), group)
    return parts[0::2].sum(0), parts[1::2].logsumexp(0)


def _logits_gradient(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    places_C: Tensor,
    logsumexp_C: Tensor,
    gradient_C: Tensor,
    softcap: float | None,
) -> Tensor:
    """[C, V] in the weight's dtype: d log p(target) / d logits is one-hot(target) - softmax."""
    logits_CV = _logits(hidden_CH, weight_VH, softcap)
    slope_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    d_logits_CV = logits_CV.sub_(logsumexp_C[:, None]).exp_().mul_(-gradient_C[:, None])
    inside_C = _inside(places_C, weight_VH)
    d_logits_CV.scatter_add_(1, places_C.where(inside_C, 0)[:, None], gradient_C.where(inside_C, 0.0)[:, None])
    if slope_CV is not None:
        d_logits_CV.mul_(slope_CV)
    return d_logits_CV.to(weight_VH.dtype)


def top_logits(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of every token and their ids, both [T, k], largest first. No gradient."""
    pieces = [_logits(hidden[chunk], head.weight, head.softcap).topk(k, dim=1) for chunk in _chunks(len(hidden))]
    values = torch.cat([piece.values for piece in pieces])
    ids = torch.cat([piece.indices for piece in pieces]) + head.first_token
    if head.tp_group is None:
        return values, ids
    values, ids = _side_by_side(values, head.tp_group), _side_by_side(ids, head.tp_group)
    best = values.topk(k, dim=1)
    return best.values, ids.gather(1, best.indices)


def _side_by_side(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, k] of every rank as [T, size * k]."""
    return torch.cat(all_gather(tensor, group).chunk(group.size()), dim=1)


def _inside(places_C: Tensor, weight_VH: Tensor) -> Tensor:
    return (places_C >= 0) & (places_C < len(weight_VH))


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, num_tokens, CHUNK)]


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(hidden_CH: Tensor, weight_VH: Tensor, softcap: float | None) -> Tensor:
    logits_CV = _accurate_matmul(hidden_CH, weight_VH.t())
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


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
