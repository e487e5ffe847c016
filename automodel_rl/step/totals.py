"""Totals of a step: sums of losses, metrics and gradient norms over microbatches, and then over ranks."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from automodel_rl.losses import Denominator, LossOutput
from automodel_rl.parallel.host_collectives import combine, from_last_stage, share_with_outsiders
from automodel_rl.parallel.layout import Layout


@dataclass
class LossTotals:
    """Sums of losses and metrics over the microbatches of this rank, on the device and detached.

    Attributes:
        sums, metrics, largest, smallest: as in `LossOutput`, over the microbatches so far.
    """

    sums: dict[Denominator, Tensor] = field(default_factory=dict)
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    smallest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        for key, value in output.sums.items():
            self.sums[key] = self.sums.get(key, 0) + value.detach()
        for name, (total, denominator) in output.metrics.items():
            before = self.metrics.get(name, (0, 0))
            self.metrics[name] = (before[0] + total.detach(), before[1] + denominator.detach())
        for name, value in output.largest.items():
            self.largest[name] = torch.maximum(self.largest.get(name, value), value).detach()
        for name, value in output.smallest.items():
            self.smallest[name] = torch.minimum(self.smallest.get(name, value), value).detach()


@dataclass(frozen=True)
class GlobalTotals:
    """Sums over all data ranks, equal on every rank.

    Attributes:
        sums: the sums of the loss, by what divides them.
        metrics: the sum and the denominator of each of the loss's metrics.
        extremes: the largest and smallest values of each of the loss's metrics that is such a value.
        square_norm: the squared norm of all gradients.
    """

    sums: dict[Denominator, float]
    metrics: dict[str, tuple[float, float]]
    extremes: dict[str, float]
    square_norm: float

    def mean_loss(self, counts: dict[Denominator, int]) -> float:
        """The loss: every sum divided by its count of the global batch, all added up."""
        return sum(total / max(counts[name], 1) for name, total in self.sums.items())

    @property
    def all_metrics(self) -> dict[str, float]:
        """All metrics, as means or extremes. Those of nothing are left out."""
        means = {name: total / denominator for name, (total, denominator) in self.metrics.items() if denominator}
        return means | {name: value for name, value in self.extremes.items() if abs(value) != math.inf}


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
    extremes = [*totals.largest.values(), *(-value for value in totals.smallest.values())]
    numbers = torch.stack([square_norm, *(value.double().to(square_norm.device) for value in flat + extremes)]).cpu()
    norm = numbers[:1].clone()
    combine(norm, layout.world_control)
    mine = None
    if layout.has_last_stage:
        added, compared = numbers[1 : 1 + len(flat)].clone(), numbers[1 + len(flat) :].clone()
        combine(added, layout.data_control)
        values = iter(added.tolist())
        mine = (
            {name: next(values) for name in totals.sums},
            {name: (next(values), next(values)) for name in totals.metrics},
            _extremes_of_ranks(compared, totals, layout),
        )
    shared = share_with_outsiders(from_last_stage(mine, layout), layout)
    return GlobalTotals(sums=shared[0], metrics=shared[1], extremes=shared[2], square_norm=norm.item())


def _extremes_of_ranks(own: Tensor, totals: LossTotals, layout: Layout) -> dict[str, float]:
    """The extremes over data ranks, from this rank's largest values and the negatives of its smallest ones."""
    if not len(own):
        return {}
    combine(own, layout.data_control, torch.maximum)
    values = iter(own.tolist())
    return {name: next(values) for name in totals.largest} | {name: -next(values) for name in totals.smallest}
