"""Totals of a step: losses, metrics and gradient norms summed over microbatches, then over ranks."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from automodel_rl.losses import Denominator, LossOutput
from automodel_rl.parallel.host_collectives import broadcast_from_last_stage, broadcast_to_outsiders, combine
from automodel_rl.parallel.layout import Layout


@dataclass
class LossTotals:
    """Sums of this rank's losses and metrics over microbatches, on the device and detached. The fields are those of
    `LossOutput`."""

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
    """Sums over all data ranks, equal on every rank."""

    sums: dict[Denominator, float]
    metrics: dict[str, tuple[float, float]]
    extremes: dict[str, float]
    square_norm: float

    def mean_loss(self, counts: dict[Denominator, int]) -> float:
        """Returns the loss: every sum divided by its global count, all added up."""
        return sum(total / max(counts[name], 1) for name, total in self.sums.items())

    @property
    def all_metrics(self) -> dict[str, float]:
        """Means and extremes of all metrics, except those without any values."""
        means = {name: total / denominator for name, (total, denominator) in self.metrics.items() if denominator}
        return means | {name: value for name, value in self.extremes.items() if abs(value) != math.inf}


def share_totals(totals: LossTotals, square_norm: Tensor, layout: Layout) -> GlobalTotals:
    """Sums the last stages' totals over data ranks, and `local_square_norm` over all ranks; equal on every rank. A
    collective of all ranks, with a single copy from device to host."""
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
    shared = broadcast_to_outsiders(broadcast_from_last_stage(mine, layout), layout)
    return GlobalTotals(sums=shared[0], metrics=shared[1], extremes=shared[2], square_norm=norm.item())


def _extremes_of_ranks(own: Tensor, totals: LossTotals, layout: Layout) -> dict[str, float]:
    """Returns extremes over data ranks, from this rank's maxima and negated minima."""
    if not len(own):
        return {}
    combine(own, layout.data_control, torch.maximum)
    values = iter(own.tolist())
    return {name: next(values) for name in totals.largest} | {name: -next(values) for name in totals.smallest}
