"""torch.optim.Muon on plain transformers in one process. `verify` compares layouts with it."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers.adamw import plain_adamw
from automodel_rl.optimizers.description import LR_FACTOR

NO_MATRICES = (
    "embed_tokens",
    "position_embedding",
    "pos_embed",
    "lm_head",
    "gate",
    "shared_expert_gate",
    "router",
    "conv1d",
)
"""Modules whose weights have two dims but are trained by AdamW, by name: embeddings, the head, routers."""


class _Exact(Tensor):
    """A float64 gradient that stays float64 in torch.optim.Muon: this asks for bfloat16 and gets a float64 copy."""

    def bfloat16(self, *_: Any, **__: Any) -> Tensor:
        return self.clone()


class PlainMuon(torch.optim.Muon):
    """torch.optim.Muon for stacks, too. torch's takes only matrices, so it gets each matrix of a stack by itself.

    Args:
        weights: [m, n] or stacks [k, m, n] of a model in one process.
        transposed: those of the stacks that are [k, n, m].
        settings: settings of torch.optim.Muon.
    """

    def __init__(self, weights: list[nn.Parameter], transposed: Collection[nn.Parameter] = (), **settings: Any):
        self.transposed = set(transposed)
        self.places = [(w, place) for w in weights for place in ([...] if w.ndim == 2 else range(len(w)))]
        self.matrices = [nn.Parameter(self._at(w, w.detach(), place)) for w, place in self.places]  # share storage
        super().__init__(self.matrices, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step with the gradients of the weights.

        Args:
            closure: part of torch's interface; torch calls it.
        """
        for matrix, (weight, place) in zip(self.matrices, self.places, strict=True):
            gradient = None if weight.grad is None else self._at(weight, weight.grad, place)
            if gradient is not None and gradient.dtype == torch.float64:
                gradient = gradient.as_subclass(_Exact)
            matrix.grad = gradient
        super().step(closure)

    def _at(self, weight: nn.Parameter, values: Tensor, place: Any) -> Tensor:
        return values[place].mT if weight in self.transposed else values[place]


def reference(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """PlainMuon for matrices, which are chosen by name, and AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if _is_matrix(name, p)]
    others = [(name, p) for name, p in named if not _is_matrix(name, p)]
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    transposed = [p for module in experts if module.is_transposed for p in module.parameters() if p.ndim == 3]
    muon = config.muon
    settings = {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.ns_steps}
    optimizer = PlainMuon(
        [parameter for _, parameter in matrices],
        transposed,
        lr=muon.lr or config.lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn=muon.adjust_lr_fn,
        **settings,
    )
    optimizer.param_groups[0][LR_FACTOR] = 1.0 if muon.lr is None else muon.lr / config.lr
    return [optimizer, plain_adamw(others, config)]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    module = name.split(".")[-2]
    return parameter.ndim in (2, 3) and not name.endswith("bias") and module not in NO_MATRICES
