"""Gradients over ranks: tied embeddings summed over their two stages, and one norm over everything.

FSDP sums gradients over data ranks (it is told not to average), and losses are divided by global counts before the
backward. So no gradient is rescaled anywhere but by clipping.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automodel_rl.parallel.layout import Layout


def sum_fsdp_gradients(part: nn.Module) -> None:
    """Makes every FSDP unit of a part sum gradients instead of averaging them."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TiedEmbedding:
    """Keeps the embedding on the first stage and the head on the last one a single weight.

    Both start from the same tensor and get the same, summed gradient, so optimizers keep them equal. The embedding
    is the weight; norm, checkpoints and exports leave `copy` out.

    Args:
        embedding: the weight on the first stage, None on other ranks.
        copy: the head's weight on the last stage, None on other ranks.
    """

    def __init__(self, embedding: nn.Parameter | None, copy: nn.Parameter | None, layout: Layout):
        self.copy = copy
        self.weights = [weight for weight in (embedding, copy) if weight is not None]
        self.group = layout.ends_group

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """A collective of the ranks that hold either weight; others return at once."""
        if not self.weights:
            return
        gradients = [local_tensor(weight.grad) for weight in self.weights if weight.grad is not None]
        total = sum(gradients[1:], start=gradients[0].clone())
        dist.all_reduce(total, group=self.group)
        for gradient in gradients:
            gradient.copy_(total)


def local_square_norm(parameters: Iterable[nn.Parameter], layout: Layout) -> Tensor:
    """This rank's part of the squared global gradient norm, such that the sum over all ranks is the square.

    A stage's parameter is held by all ranks of that stage together: as shards, as copies, or both. So the local square
    is divided by the number of copies, ranks of the stage / shards.

    Returns:
        A float64 scalar on the layout's device.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        copies = layout.ranks_per_stage // _num_shards(gradient)
        by_copies.setdefault(copies, []).append(local_tensor(gradient))
    total = torch.zeros((), dtype=torch.float64, device=layout.device)
    for copies, gradients in by_copies.items():
        total += nn.utils.get_total_norm(gradients).double().square() / copies
    return total


def _num_shards(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    axes = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(axis) for axis, placement in axes if placement.is_shard())
