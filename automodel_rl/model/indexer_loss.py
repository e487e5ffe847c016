"""The indexers' own loss (DeepSeek-V3.2, arXiv:2512.02556, eq. 4): the scores that an indexer gives the keys of a query
should be distributed as the layer's attention is.

For each query it is the KL divergence of the softmax of scores from attention's weights, averaged over heads. Weights
and the indexer's inputs are constants in it, so it trains indexers alone. The gradient by scores is softmax - weights.
It is made in the forward, for some queries at a time, so that no [t, t] waits for the backward. A layer that takes over
the index of another adds its own divergence to that index's loss.

Under tensor parallelism a rank knows the weights of its own heads only. As the gradient is linear in them, each rank's
is a summand, as that of other weights which ranks share, and ranks need not exchange anything for it.

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
"""Metric: the cross-entropy of indexers' softmax to attention's weights, averaged over tokens and layers. It is the
divergence and the entropy of the weights, which is its least value."""


class IndexerLoss:
    """The loss of the indexers of a part.

    Args:
        weight: the weight of its mean over tokens, summed over layers.
        scope: shows which microbatch a layer computes.
        num_tp: number of ranks that share the heads of attention.

    Attributes:
        factor: the weight divided by the number of tokens of the global batch, float64 [].
        num_tokens: number of tokens in the global batch.
        total: this rank's summand of cross-entropies, summed over tokens and layers, since the step began, float64 [].
    """

    def __init__(self, weight: float, scope: MicrobatchScope, num_tp: int):
        self.weight, self.scope, self.num_tp = weight, scope, num_tp
        self.factor = self.total = torch.zeros((), dtype=torch.float64)
        self.num_tokens = 1

    def start_step(self, num_tokens: int, device: torch.device) -> None:
        """Starts a new step.

        Args:
            num_tokens: number of tokens in the global batch.
            device: this rank's device.
        """
        self.num_tokens = max(num_tokens, 1)
        self.factor = torch.tensor(self.weight / self.num_tokens, dtype=torch.float64, device=device)
        self.total = torch.zeros_like(self.factor)

    def is_real(self, queries: Tensor | None) -> Tensor:
        """False for pads, bool [q], of some of this rank's tokens.

        Args:
            queries: their places, int64; None for all.
        """
        assert self.scope.microbatch is not None, "an indexer runs outside of a layer that notes its microbatch"
        is_real = self.scope.microbatch.is_real
        return is_real if queries is None else is_real.index_select(0, queries)

    @torch.no_grad()
    def by_scores(self, scores: Tensor, products: Tensor, seen: Tensor, is_real: Tensor) -> Tensor:
        """This rank's summand of the gradient of the loss by an indexer's scores. The cross-entropy is added to
        `total`, unless it is computed again for the backward.

        Args:
            scores: the indexer's, fp32 or wider [q, k].
            products: scaled products of queries and keys of this rank's heads of attention, [h, q, k].
            seen: True for the keys that a query sees, bool [q, k].
            is_real: False for pads, bool [q].

        Returns:
            Like `scores`.
        """
        weights = products.to(scores.dtype).masked_fill(~seen, -torch.inf).softmax(-1).sum(0)
        weights /= len(products) * self.num_tp
        logs = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
        entropies = -(weights * logs.masked_fill(~seen, 0.0)).sum(-1).where(is_real, 0.0)
        self.total.add_(entropies.sum() * self.scope.is_first)
        return (logs.exp() / self.num_tp - weights) * is_real[:, None] * self.factor.to(scores.dtype)


def cross_entropy(losses: Sequence[IndexerLoss], num_layers: int, layout: Layout) -> dict[str, float]:
    """`CROSS_ENTROPY` of the step, equal on every rank. A collective.

    Args:
        losses: those of this rank's parts.
        num_layers: number of layers of the whole model.
        layout: this rank's place.
    """
    total = torch.stack([loss.total for loss in losses]).sum().cpu()
    combine(total, layout.world_control)
    return {CROSS_ENTROPY: total.item() / (losses[0].num_tokens * num_layers)}


class AddGradients(torch.autograd.Function):
    """Passes a tensor through, and gives others gradients that are known: `apply(tensor, *others, *gradients)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*others_and_gradients[len(others_and_gradients) // 2 :])
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors  # which recomputation gives once
        return gradients[0], *known, *(None for _ in known)
