"""Log-probabilities of targets, and entropies, from hidden states, a chunk of tokens at a time: [T, V] never exists.

Shape letters: T tokens, H hidden size, V vocabulary (this rank's part of it under tensor parallelism), C tokens of a
chunk, K numbers that are read for a token.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.block_sizes import block_sizes
from automodel_rl.losses import Readout
from automodel_rl.parallel.collectives import all_gather


@dataclass(frozen=True)
class Head:
    """The output projection as one rank holds it.

    Attributes:
        weight: this rank's part, [V, H].
        softcap: turns logits into softcap * tanh(logits / softcap), if not None.
        tp_group: the ranks that hold the parts of the vocabulary, in order; None if this rank holds all of it.
    """

    weight: Tensor
    softcap: float | None = None
    tp_group: dist.ProcessGroup | None = None

    @property
    def first_token(self) -> int:
        """Token id of the weight's first row."""
        return 0 if self.tp_group is None else self.tp_group.rank() * len(self.weight)


OutputFn = Callable[[Tensor, Head, LocalMicrobatch], Tensor]
"""(final hidden states [t, H], head, this rank's part of the microbatch) -> result [t, ...]. It runs inside the last
stage."""


def read_targets(readout: Readout) -> OutputFn:
    """An output function that gives what `readout` asks for, for every token."""
    return functools.partial(target_readout, readout=readout)


def target_readout(hidden: Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout) -> Tensor:
    """log p(target) under softmax(hidden @ weight.T / temperature), and the softmax's entropy if it is asked for.

    Args:
        hidden: final hidden states [T, H]. Under tensor parallelism its gradient is this rank's summand.
        head: the output projection.
        microbatch: its `targets` are scored.
        readout: the temperature, and whether to give the entropy, too.

    Returns:
        [T, 1], or [T, 2] with the entropy; 0 where there is no target; float64 for float64 hidden states, else float32;
        equal on all tp ranks.
    """
    return _TargetReadout.apply(hidden, head.weight, microbatch.targets, head, readout)


class _TargetReadout(torch.autograd.Function):
    """Keeps the log-sum-exp (and entropy) of every token and recomputes each chunk's logits in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head, readout: Readout) -> Tensor:
        softmax = _Softmax(weight, head.softcap, readout.temperature)
        picked = torch.empty(targets.shape, dtype=_accurate(hidden.dtype), device=hidden.device)
        logsumexp = torch.empty_like(picked)
        mean_logit = torch.empty_like(picked) if readout.entropy else None
        places = targets - head.first_token
        for chunk in _chunks(len(targets)):
            mean = None if mean_logit is None else mean_logit[chunk]
            picked[chunk], logsumexp[chunk] = softmax.score(hidden[chunk], places[chunk], mean)
        if head.tp_group is not None:
            picked, logsumexp, mean_logit = _over_vocabulary(picked, logsumexp, mean_logit, head.tp_group)
        is_target = targets >= 0
        entropy = None if mean_logit is None else logsumexp - mean_logit
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy)
        ctx.softmax, ctx.first_token = softmax, head.first_token
        columns = [picked - logsumexp] if entropy is None else [picked - logsumexp, entropy]
        return torch.stack([torch.where(is_target, column, 0.0) for column in columns], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, targets, logsumexp, entropy = ctx.saved_tensors
        gradient = torch.where((targets >= 0)[:, None], gradients[0], 0.0)
        places = targets - ctx.first_token
        d_hidden = torch.empty_like(hidden)
        d_weight = None
        if ctx.needs_input_grad[1]:  # not if only adapters are trained
            d_weight = torch.zeros(weight.shape, dtype=_accurate(weight.dtype), device=weight.device)
        for chunk in _chunks(len(targets)):
            d_logits = ctx.softmax.gradient(
                hidden[chunk],
                places[chunk],
                logsumexp[chunk],
                gradient[chunk],
                None if entropy is None else entropy[chunk],
            )
            d_hidden[chunk] = d_logits @ weight
            if d_weight is not None:
                _add_matmul(d_weight, d_logits.t(), hidden[chunk])
            del d_logits  # before the next chunk's
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


@dataclass(frozen=True)
class _Softmax:
    """softmax(cap(hidden @ weight.T) / temperature) over this rank's part of the vocabulary, a chunk at a time."""

    weight: Tensor
    softcap: float | None
    temperature: float

    def score(self, hidden_CH: Tensor, places_C: Tensor, mean_logit_C: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logit of every target (0 if it is not in this part) and log-sum-exp of all logits, both [C].

        It works in place in one [C, V] buffer. If `mean_logit_C` is given, it is filled with the softmax's mean logit,
        which takes a second buffer.
        """
        logits_CV = self._logits(hidden_CH)
        inside_C = _inside(places_C, self.weight)
        picked_C = logits_CV.gather(1, places_C.where(inside_C, 0)[:, None])[:, 0].where(inside_C, 0.0)
        largest_C = logits_CV.amax(1)
        if mean_logit_C is None:
            return picked_C, logits_CV.sub_(largest_C[:, None]).exp_().sum(1).log_().add_(largest_C)
        weights_CV = (logits_CV - largest_C[:, None]).exp_()
        total_C = weights_CV.sum(1)
        mean_logit_C.copy_(weights_CV.mul_(logits_CV).sum(1) / total_C)
        return picked_C, total_C.log_().add_(largest_C)

    def gradient(
        self,
        hidden_CH: Tensor,
        places_C: Tensor,
        logsumexp_C: Tensor,
        gradient_CK: Tensor,
        entropy_C: Tensor | None,
    ) -> Tensor:
        """The gradient of the projection's output, [C, V] in the weight's dtype.

        The derivative of log p(target) by the logits is one-hot(target) - p. That of the entropy is
        -p * (log p + entropy).
        """
        logits_CV = self._logits(hidden_CH)
        slope_CV = None if self.softcap is None else 1 - (logits_CV * (self.temperature / self.softcap)).square()
        logprobs_CV = logits_CV.sub_(logsumexp_C[:, None])
        d_target_C = gradient_CK[:, 0]
        if entropy_C is None:
            d_logits_CV = logprobs_CV.exp_().mul_(-d_target_C[:, None])
        else:
            p_CV = logprobs_CV.exp()
            surprise_CV = logprobs_CV.add_(entropy_C[:, None]).mul_(gradient_CK[:, 1:])
            d_logits_CV = surprise_CV.add_(d_target_C[:, None]).mul_(p_CV).neg_()
        inside_C = _inside(places_C, self.weight)
        d_logits_CV.scatter_add_(1, places_C.where(inside_C, 0)[:, None], d_target_C.where(inside_C, 0.0)[:, None])
        if slope_CV is not None:
            d_logits_CV.mul_(slope_CV)
        if self.temperature != 1.0:
            d_logits_CV.div_(self.temperature)
        return d_logits_CV.to(self.weight.dtype)

    def _logits(self, hidden_CH: Tensor) -> Tensor:
        logits_CV = _logits(hidden_CH, self.weight, self.softcap)
        return logits_CV if self.temperature == 1.0 else logits_CV.div_(self.temperature)


def _over_vocabulary(
    picked: Tensor, logsumexp: Tensor, mean_logit: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combines these values, for each rank's part of the vocabulary, over all tp ranks in one collective."""
    columns = [picked, logsumexp] if mean_logit is None else [picked, logsumexp, mean_logit]
    parts = all_gather(torch.stack(columns), group).view(group.size(), len(columns), -1)
    total = parts[:, 1].logsumexp(0)
    mean = None if mean_logit is None else ((parts[:, 1] - total).exp() * parts[:, 2]).sum(0)
    return parts[:, 0].sum(0), total, mean


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
    """Tensors [T, k] of all ranks side by side, [T, size * k]."""
    return torch.cat(all_gather(tensor, group).chunk(group.size()), dim=1)


def _inside(places_C: Tensor, weight_VH: Tensor) -> Tensor:
    return (places_C >= 0) & (places_C < len(weight_VH))


def _chunks(num_tokens: int) -> list[slice]:
    size = block_sizes.head_tokens
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


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
    """a @ b in fp32 or wider. On CUDA the product of 16-bit matrices is not rounded to 16 bits on its way."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(_accurate(a.dtype))
