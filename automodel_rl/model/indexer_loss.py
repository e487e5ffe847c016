"""The indexers' own loss (DeepSeek-V3.2, arXiv:2512.02556, eq. 4): an indexer's scores of a query's keys should be
distributed like the layer's attention.

It is the KL divergence of the softmax of scores from the attention weights, averaged over heads. Weights and the
indexer's inputs are constants, so only indexers are trained. The gradient by scores is softmax - weights, computed in
the forward in blocks of queries, so that no [t, t] tensor is kept for the backward. A layer that reuses another's
index adds its divergence to that index's loss.

Under tensor parallelism a rank knows only its own heads' weights. The gradient is linear in them, so each rank's is a
summand, reduced like that of other shared weights.

Shape letters: q queries and k keys of one sequence, t tokens of a rank, h heads of attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.parallel.host_collectives import combine
from automodel_rl.parallel.layout import Layout

CROSS_ENTROPY = "indexer/cross_entropy"
"""Metric: cross-entropy of the indexers' softmax to attention weights, averaged over tokens and layers. Its minimum
is the entropy of the weights."""


class IndexerLoss:
    """The loss of a part's indexers.

    Args:
        weight: factor of the loss (mean over tokens, summed over layers).
        scope: the microbatch that a layer currently computes.

    Attributes:
        factor: weight / tokens of the global batch, float64 [].
        total: this rank's summand of cross-entropies over tokens and layers since the step began, float64 [].
    """

    def __init__(self, weight: float, scope: MicrobatchScope, num_tp: int):
        self.weight, self.scope, self.num_tp = weight, scope, num_tp
        self.factor = self.total = torch.zeros((), dtype=torch.float64)
        self.num_tokens = 1

    def start_step(self, num_tokens: int, device: torch.device) -> None:
        """Resets the sums for a global batch of `num_tokens`."""
        self.num_tokens = max(num_tokens, 1)
        self.factor = torch.tensor(self.weight / self.num_tokens, dtype=torch.float64, device=device)
        self.total = torch.zeros_like(self.factor)

    def is_real(self, queries: Tensor | None) -> Tensor:
        """Returns False for pads, bool [q], of this rank's tokens at `queries`, int64; None for all."""
        assert self.scope.microbatch is not None, "an indexer runs outside a layer that records its microbatch"
        is_real = self.scope.microbatch.is_real
        return is_real if queries is None else is_real.index_select(0, queries)

    @torch.no_grad()
    def by_scores(self, scores: Tensor, products: Tensor, seen: Tensor, is_real: Tensor) -> Tensor:
        """Returns this rank's summand of the loss's gradient by an indexer's scores. Adds to `total`, except in a
        recomputation.

        Args:
            scores: fp32 or wider [q, k].
            products: scaled query-key products of this rank's attention heads, [h, q, k].
            seen: True for the keys that a query sees, bool [q, k].
            is_real: False for pads, bool [q].
        """
        weights = products.to(scores.dtype).masked_fill(~seen, -torch.inf).softmax(-1).sum(0)
        weights /= len(products) * self.num_tp
        logs = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
        entropies = -(weights * logs.masked_fill(~seen, 0.0)).sum(-1).where(is_real, 0.0)
        self.total.add_(entropies.sum() * self.scope.is_first)
        return (logs.exp() / self.num_tp - weights) * is_real[:, None] * self.factor.to(scores.dtype)


def cross_entropy(losses: Sequence[IndexerLoss], num_layers: int, layout: Layout) -> dict[str, float]:
    """Returns the step's `CROSS_ENTROPY`, equal on every rank. A collective. `losses` are this rank's parts';
    `num_layers` is the whole model's."""
    total = torch.stack([loss.total for loss in losses]).sum().cpu()
    combine(total, layout.world_control)
    return {CROSS_ENTROPY: total.item() / (losses[0].num_tokens * num_layers)}


class AddGradients(torch.autograd.Function):
    """Identity on the first tensor that adds known gradients to others: `apply(tensor, *others, *gradients)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*others_and_gradients[len(others_and_gradients) // 2 :])
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors  # read once: recomputation provides them a single time
        return gradients[0], *known, *(None for _ in known)
