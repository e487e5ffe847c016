"""Gradients over ranks: sums over tensor-parallel ranks, tied embeddings, and the global norm.

FSDP sums gradients over data ranks instead of averaging, and losses are divided by global counts before the backward.
So nothing rescales gradients but clipping.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import local_tensor, num_shards


@torch.no_grad()
def sum_partial_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums gradients over the tp ranks in one collective per step, for weights that each rank applied to part of the
    data: per-head norms and, with sequence parallelism, all weights that are not split."""
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


class TiedEmbedding:
    """Keeps the embedding on the first stage and the head on the last one equal.

    Both start from the same tensor and receive the same, summed gradient. The embedding represents both: gradient
    norm, checkpoints and exports skip `copy`.

    Args:
        embedding: the weight on the first stage; None on other ranks.
        copy: the head's weight on the last stage; None on other ranks.
    """

    def __init__(self, embedding: nn.Parameter | None, copy: nn.Parameter | None, layout: Layout):
        self.copy = copy
        self.weights = [weight for weight in (embedding, copy) if weight is not None]
        self.group = layout.ends_group

    @property
    def trained_copy(self) -> nn.Parameter | None:
        """The head's weight, if this rank has and trains it."""
        return self.copy if self.copy is not None and self.copy.requires_grad else None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sums the gradients of both. A collective of the ranks that hold either weight; others return at once."""
        gradients = [local_tensor(weight.grad) for weight in self.weights if weight.grad is not None]
        if not gradients:  # this rank has neither weight, or they are frozen
            return
        total = sum(gradients[1:], start=gradients[0].clone())
        dist.all_reduce(total, group=self.group)
        for gradient in gradients:
            gradient.copy_(total)


def tied_embedding(parts: Sequence[Any], layout: Layout) -> TiedEmbedding:
    """Returns the copies of a tied embedding in this rank's stages."""
    embeddings = [part.model.embed_tokens.weight for part in parts if part.model.embed_tokens is not None]
    heads = [part.lm_head.weight for part in parts if part.lm_head is not None]
    return TiedEmbedding(next(iter(embeddings), None), next(iter(heads), None), layout)


def local_square_norm(parameters: Iterable[nn.Parameter], layout: Layout) -> Tensor:
    """Returns this rank's summand of the squared global gradient norm, a float64 scalar on the layout's device.

    The ranks of a stage together hold each of its parameters, as shards, replicas, or both. So the local square is
    divided by the number of replicas, ranks of the stage / shards.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        copies = layout.ranks_per_stage // num_shards(gradient)
        by_copies.setdefault(copies, []).append(local_tensor(gradient))
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    for copies, gradients in by_copies.items():
        total += nn.utils.get_total_norm(gradients).double().square() / copies
    return total
