"""Totals of a step: sums of losses, metrics and gradient norms over microbatches, and then over ranks."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.losses import Denominator, LossOutput
from automodel_rl.parallel.host_collectives import from_last_stage, share_with_guests
from automodel_rl.parallel.layout import Layout


@dataclass
class LossTotals:
    """Sums of losses and metrics over the microbatches of this rank, on the device and detached."""

    sums: dict[Denominator, Tensor] = field(default_factory=dict)
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        for key, value in output.sums.items():
            self.sums[key] = self.sums.get(key, 0) + value.detach()
        for name, (total, denominator) in output.metrics.items():
            before = self.metrics.get(name, (0, 0))
            self.metrics[name] = (before[0] + total.detach(), before[1] + denominator.detach())


@dataclass(frozen=True)
class GlobalTotals:
    """Sums over all data ranks, equal on every rank.

    Attributes:
        sums: the sums of the loss, by what divides them.
        metrics: the sum and the denominator of each of the loss's metrics.
        square_norm: the squared norm of all gradients.
    """

    sums: dict[Denominator, float]
    metrics: dict[str, tuple[float, float]]
    square_norm: float

    def mean_loss(self, counts: dict[Denominator, int]) -> float:
        """The loss: every sum divided by its count of the global batch, all added up."""
        return sum(total / max(counts[name], 1) for name, total in self.sums.items())

    @property
    def mean_metrics(self) -> dict[str, float]:
        """The means of metrics. Metrics with denominator 0 are left out."""
        return {name: total / denominator for name, (total, denominator) in self.metrics.items() if denominator}


def share_totals(totals: LossTotals, square_norm: Tensor, layout: Layout) -> GlobalTotals:
    """Adds the last stages' totals over data ranks and the squared norms over all ranks. A collective of all ranks.

    It copies from the device to the host once.

    Args:
        totals: this rank's totals; filled on last stages only.
        square_norm: `local_square_norm` of this rank.
        layout: this rank's place.

    Returns:
        The totals, equal on every rank.
    """
    flat = [*totals.sums.values(), *(value for pair in totals.metrics.values() for value in pair)]
    numbers = torch.stack([square_norm, *(value.double().to(square_norm.device) for value in flat)]).cpu()
    norm = numbers[:1].clone()
    dist.all_reduce(norm, group=layout.world_control)
    mine = None
    if layout.has_last_stage:
        dist.all_reduce(numbers, group=layout.data_control)
        values = iter(numbers[1:].tolist())
        mine = (
            {name: next(values) for name in totals.sums},
            {name: (next(values), next(values)) for name in totals.metrics},
        )
    shared = share_with_guests(from_last_stage(mine, layout), layout)
    return GlobalTotals(sums=shared[0], metrics=shared[1], square_norm=norm.item())
