"""Log-probabilities of targets, and entropies, computed in chunks of tokens: [T, V] logits are never materialised.

Shape letters: T tokens, H hidden size, V vocabulary (this rank's shard under tensor parallelism), C tokens of a
chunk, K token ids read per token, its target first.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.batch.tensors import LOGPROB_GRADIENT, READ_IDS
from automodel_rl.block_sizes import block_sizes
from automodel_rl.losses import Readout
from automodel_rl.model.head import Head, accurate, accurate_matmul, add_matmul
from automodel_rl.model.softmax import BackwardInputs, Softmax, cap
from automodel_rl.parallel.collectives import all_gather


def target_readout(hidden: Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout) -> Tensor:
    """Computes log p(target) under softmax(hidden @ weight.T / temperature), and on request the softmax's entropy.

    Args:
        hidden: final hidden states [T, H]. Under tensor parallelism its gradient is this rank's summand.

    Returns:
        The columns of `TokenOutputs.from_columns`: log p(target), then log p of each of `READ_IDS` if there are any,
            then the entropy if requested. 0 where there is no target or id; float64 for float64 hidden states, else
            float32; equal on all tp ranks.
    """
    wanted = microbatch.targets[:, None]
    if READ_IDS in microbatch.tokens:
        ids = microbatch.tokens[READ_IDS]
        wanted = torch.cat([wanted, torch.where(wanted >= 0, ids, -1)], dim=1)
    known = microbatch.tokens.get(LOGPROB_GRADIENT)
    if known is None or readout.entropy or not torch.is_grad_enabled():
        return _TargetReadout.apply(hidden, head.weight, wanted, head, readout)
    # The known gradient is that of the targets only, or of the other ids only.
    missing = (0, wanted.shape[1] - 1) if known.ndim == 1 else (1, 0)
    known = functional.pad(known.view(len(known), -1), missing)
    return _LinearLossReadout.apply(hidden, head.weight, wanted, known, head, readout)


class _TargetReadout(torch.autograd.Function):
    """Keeps each token's log-sum-exp (and entropy) and recomputes the logits in the backward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor, head: Head, readout: Readout) -> Tensor:
        work = _HeadWork(hidden, weight, wanted, head, readout.temperature)
        scores = work.empty_scores(readout.entropy)
        for chunk in work.chunks:
            scores.put(chunk, work.score(work.products(chunk), chunk, readout.entropy))
        ctx.save_for_backward(hidden, weight, wanted, scores.logsumexp, scores.entropy)
        ctx.head, ctx.readout = head, readout
        return scores.columns(wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, wanted, logsumexp, entropy = ctx.saved_tensors
        width = wanted.shape[1]
        d_logprobs = torch.where(wanted >= 0, gradients[0][:, :width], 0.0)
        d_entropy = None if entropy is None else torch.where(wanted[:, 0] >= 0, gradients[0][:, width], 0.0)
        work = _HeadWork(hidden, weight, wanted, ctx.head, ctx.readout.temperature)
        sums = _GradientSums(work, ctx.needs_input_grad[1])
        for tokens, chunks in work.groups:
            for chunk in chunks:
                of_entropy = () if entropy is None or d_entropy is None else (entropy[chunk], d_entropy[chunk])
                given = BackwardInputs(logsumexp[chunk], d_logprobs[chunk], *of_entropy)
                sums.put(work.products(chunk), chunk, tokens.start, given)
            sums.add(tokens)
        return sums.d_hidden, sums.for_autograd(), None, None, None


class _LinearLossReadout(torch.autograd.Function):
    """Computes the gradients in the forward, while the logits exist, for a loss whose gradient is known in advance."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor, known: Tensor, head: Head, readout: Readout
    ) -> Tensor:
        known = torch.where(wanted >= 0, known, 0.0).to(accurate(hidden.dtype))
        work = _HeadWork(hidden, weight, wanted, head, readout.temperature)
        scores, sums = work.empty_scores(False), _GradientSums(work, ctx.needs_input_grad[1])
        for tokens, chunks in work.groups:
            for chunk in chunks:
                products = work.products(chunk)
                scores.put(chunk, work.score(products, chunk, False))
                sums.put(products, chunk, tokens.start, BackwardInputs(scores.logsumexp[chunk], known[chunk]))
                del products  # before the next chunk allocates its own
            sums.add(tokens)
        ctx.save_for_backward(sums.d_hidden, sums.for_autograd())
        ctx.head = head
        return scores.columns(wanted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        if ctx.head.gradient is not None:
            ctx.head.gradient()  # leaves a sum to reduce even if another microbatch's backward has reduced this one's
        return d_hidden, d_weight, None, None, None, None


@dataclass
class _Scores:
    """Per-token results over the whole vocabulary: logits [T, K] of the wanted ids, the others [T]."""

    picked: Tensor
    logsumexp: Tensor
    mean_logit: Tensor | None

    def put(self, chunk: slice, of_chunk: tuple[Tensor, Tensor, Tensor | None]) -> None:
        for all_tokens, tokens in zip((self.picked, self.logsumexp, self.mean_logit), of_chunk, strict=True):
            if all_tokens is not None and tokens is not None:
                all_tokens[chunk] = tokens

    @property
    def entropy(self) -> Tensor | None:
        return None if self.mean_logit is None else self.logsumexp - self.mean_logit

    def columns(self, wanted: Tensor) -> Tensor:
        logprobs = torch.where(wanted >= 0, self.picked - self.logsumexp[:, None], 0.0)
        if self.entropy is None:
            return logprobs
        return torch.cat([logprobs, torch.where(wanted[:, :1] >= 0, self.entropy[:, None], 0.0)], dim=1)


class _HeadWork:
    """The head's computation for a microbatch, in chunks of tokens and groups of chunks as large as memory allows."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: Tensor, head: Head, temperature: float):
        self.hidden, self.weight, self.head = hidden, weight, head
        self.places = wanted - head.first_token
        self.softmax = Softmax(head.softcap, temperature / head.factor, head.compiled)
        self.chunks = _chunks(len(wanted), weight)
        size = block_sizes.head_group
        groups = [self.chunks[start : start + size] for start in range(0, len(self.chunks), size)]
        self.groups = [(slice(group[0].start, group[-1].stop), group) for group in groups]

    def empty_scores(self, with_mean: bool) -> _Scores:
        picked = torch.empty(self.places.shape, dtype=accurate(self.hidden.dtype), device=self.hidden.device)
        logsumexp = torch.empty_like(picked[:, 0])
        return _Scores(picked, logsumexp, torch.empty_like(logsumexp) if with_mean else None)

    def products(self, chunk: slice) -> Tensor:
        return accurate_matmul(self.hidden[chunk], self.weight.t())

    def score(self, products: Tensor, chunk: slice, with_mean: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        scores = self.softmax.score(products, self.places[chunk], with_mean)
        return scores if self.head.tp_group is None else _over_vocabulary(*scores, self.head.tp_group)


class _GradientSums:
    """Gradients of hidden states and weight, computed group by group."""

    def __init__(self, work: _HeadWork, for_autograd: bool):
        self.work, weight = work, work.weight
        self.d_hidden = torch.empty_like(work.hidden)
        longest = max((tokens.stop - tokens.start for tokens, _ in work.groups), default=0)
        self._d_products = torch.empty(longest, len(weight), dtype=weight.dtype, device=weight.device)
        self._d_weight = None if work.head.gradient is None else work.head.gradient()  # None for a frozen head
        if for_autograd:
            self._d_weight = torch.zeros(weight.shape, dtype=accurate(weight.dtype), device=weight.device)

    def put(self, products: Tensor, chunk: slice, first: int, given: BackwardInputs) -> None:
        """Computes the gradient of a chunk's products. `first` is the first token of its group."""
        out = self._d_products[chunk.start - first : chunk.stop - first]
        self.work.softmax.gradient(products, self.work.places[chunk], given, out)

    def add(self, tokens: slice) -> None:
        """Adds the gradients of a group, once all its chunks have been put."""
        d_products = self._d_products[: tokens.stop - tokens.start]
        torch.mm(d_products, self.work.weight, out=self.d_hidden[tokens])
        if self._d_weight is not None:
            add_matmul(self._d_weight, d_products.t(), self.work.hidden[tokens])

    def for_autograd(self) -> Tensor | None:
        """Returns the weight's gradient if autograd needs it."""
        if self._d_weight is None or self.work.head.gradient is not None:
            return None
        return self._d_weight.to(self.work.weight.dtype)


def _over_vocabulary(
    picked: Tensor, logsumexp: Tensor, mean_logit: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combines the vocabulary shards' values over tp ranks in one collective."""
    columns = [logsumexp] if mean_logit is None else [logsumexp, mean_logit]
    rows = torch.cat([torch.stack(columns), picked.t()])
    parts = all_gather(rows, group).view(group.size(), *rows.shape)
    total = parts[:, 0].logsumexp(0)
    mean = None if mean_logit is None else ((parts[:, 0] - total).exp() * parts[:, 1]).sum(0)
    return parts[:, len(columns) :].sum(0).t(), total, mean


def top_logits(hidden: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest logits of every token and their ids, both [T, k], largest first. No gradient.

    Raises:
        ValueError: the vocabulary has fewer than k tokens.
    """
    values, ids, _ = _top(hidden, head, k)
    return values, ids


def top_logprobs(hidden: Tensor, head: Head, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the k largest log-probabilities of every token under softmax(logits / temperature) and their ids, both
    [T, k], largest first. No gradient.

    Raises:
        ValueError: the vocabulary has fewer than k tokens.
    """
    values, ids, logsumexp = _top(hidden, head, k, temperature)
    return values - logsumexp, ids


def _top(hidden: Tensor, head: Head, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the k largest logits / temperature and their ids, [T, k], and the log-sum-exp over the vocabulary,
    [T, 1]."""
    size = 1 if head.tp_group is None else head.tp_group.size()
    if k > size * len(head.weight):
        raise ValueError(f"k={k}: the vocabulary has {size * len(head.weight)} tokens")
    values, ids, sums = [], [], []
    for chunk in _chunks(len(hidden), head.weight):
        logits = _logits(hidden[chunk], head) / temperature
        # One rank may hold all k, and a shard may have fewer than k tokens.
        best = logits.topk(min(k, len(head.weight)), dim=1)
        values.append(best.values)
        ids.append(best.indices + head.first_token)
        sums.append(logits.logsumexp(1, keepdim=True))
    found, places, logsumexp = torch.cat(values), torch.cat(ids), torch.cat(sums)
    if head.tp_group is None:
        return found, places, logsumexp
    found, places = _side_by_side(found, head.tp_group), _side_by_side(places, head.tp_group)
    of_all = found.topk(k, dim=1)
    logsumexp = _side_by_side(logsumexp, head.tp_group).logsumexp(1, keepdim=True)
    return of_all.values, places.gather(1, of_all.indices), logsumexp


def _side_by_side(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the ranks' tensors [T, k] to [T, size * k]."""
    return torch.cat(all_gather(tensor, group).chunk(group.size()), dim=1)


def _chunks(num_tokens: int, weight_VH: Tensor) -> list[slice]:
    """Returns slices of tokens whose logits exist at once; multiples of 128 tokens if that many fit."""
    most = block_sizes.head_bytes if weight_VH.is_cuda else block_sizes.head_bytes // 32  # GPUs need large matrices
    size = max(1, most // (len(weight_VH) * accurate(weight_VH.dtype).itemsize))
    size -= size % 128 if size > 128 else 0
    starts = list(range(0, num_tokens, size))
    if len(starts) > 1 and num_tokens - starts[-1] == 1:  # compiled functions would need another graph for one row
        starts.pop()
    return [slice(start, end) for start, end in itertools.pairwise([*starts, num_tokens])]


def _logits(hidden_CH: Tensor, head: Head) -> Tensor:
    return head.factor * cap(accurate_matmul(hidden_CH, head.weight.t()), head.softcap)
