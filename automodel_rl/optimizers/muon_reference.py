"""torch.optim.Muon on plain transformers in one process, with which `verify` compares layouts."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers.adamw import plain_adamw
from automodel_rl.optimizers.description import LR_FACTOR, RunPlain
from automodel_rl.optimizers.observed_uses import observed_uses


class _Exact(Tensor):
    """A float64 gradient that stays float64 in torch.optim.Muon, whose casts to bfloat16 (`bfloat16`, from torch 2.14
    on `to`) get a float64 copy."""

    def bfloat16(self, *_: Any, **__: Any) -> Tensor:
        return self.clone()

    def to(self, *arguments: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.bfloat16:
            return self.clone()
        return super().to(*arguments, **options)


class PlainMuon(torch.optim.Muon):
    """torch.optim.Muon that also accepts stacks, by passing each matrix separately.

    Args:
        weights: [m, n] or stacks [k, m, n] of a model in one process.
        transposed: the weights stored as [n, m], or stacks of such.
    """

    def __init__(self, weights: list[nn.Parameter], transposed: Collection[nn.Parameter] = (), **settings: Any):
        self.transposed = set(transposed)
        self.places = [(w, place) for w in weights for place in ([...] if w.ndim == 2 else range(len(w)))]
        self.matrices = [nn.Parameter(self._at(w, w.detach(), place)) for w, place in self.places]  # share storage
        super().__init__(self.matrices, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step with the gradients of the weights."""
        for matrix, (weight, place) in zip(self.matrices, self.places, strict=True):
            gradient = None if weight.grad is None else self._at(weight, weight.grad, place)
            if gradient is not None and gradient.dtype == torch.float64:
                gradient = gradient.as_subclass(_Exact)
            matrix.grad = gradient
        super().step(closure)

    def _at(self, weight: nn.Parameter, values: Tensor, place: Any) -> Tensor:
        return values[place].mT if weight in self.transposed else values[place]


def reference(model: nn.Module, config: OptimizerConfig, run: RunPlain) -> list[torch.optim.Optimizer]:
    """PlainMuon for weights observed in use as matrices, AdamW for the rest."""
    uses, muon = observed_uses(model, run), config.muon
    settings = {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.ns_steps}
    optimizer = PlainMuon(
        [parameter for parameter in model.parameters() if parameter in uses.matrices],
        uses.transposed,
        lr=muon.lr or config.lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn=muon.adjust_lr_fn,
        **settings,
    )
    optimizer.param_groups[0][LR_FACTOR] = 1.0 if muon.lr is None else muon.lr / config.lr
    others = [parameter for parameter in model.parameters() if parameter not in uses.matrices]
    return [optimizer, plain_adamw(others, uses.decayed, config)]
