"""Training of a mixture's routers: expert load, auxiliary loss, and DeepSeek's bias.

Routers are the models' own modules and only observed here (their forward calls `Watched.count`). Pads and empty
microbatches do not count. A token with a route (mixture/router_replay.py) counts for the experts on it.
"""

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import RouterShape
from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.config.model import MoEConfig
from automodel_rl.families.family import Family
from automodel_rl.parallel.collectives import all_reduce
from automodel_rl.parallel.host_collectives import combine
from automodel_rl.parallel.layout import Layout

RouterOutput = tuple[Any, Any, Any]
"""Each token's logits of all experts, and weights and ids of the chosen ones, in the router's own order.
nemo_automodel's routers return None for the logits."""

_ORDERS = ((2, 1, 0), (2, 0, 1), (0, 1, 2))
"""Indices of logits, weights and ids in a router's output, by the index of the ids."""

LOAD_METRIC = "moe/load_max"
"""Metric: the largest load of an expert relative to the mean load, averaged over layers; 1 is even."""


def routers_of(layers: dict[int, Any], family: Family) -> dict[int, Any]:
    """Returns the layers' routers by layer number. The family names the router module."""
    return {number: getattr(block, family.router) for number, block in _mixtures_of(layers, family).items()}


def biases_of(layers: dict[int, Any], family: Family) -> dict[int, Tensor]:
    """Returns the biases by which routers choose experts, float [E], by layer number; empty if there are none."""
    if not family.router_bias:
        return {}
    return {number: block.get_buffer(family.router_bias) for number, block in _mixtures_of(layers, family).items()}


def _mixtures_of(layers: dict[int, Any], family: Family) -> dict[int, Any]:
    if not family.is_moe:
        return {}
    blocks = {number: dict(layer.named_modules()).get(family.block) for number, layer in layers.items()}
    return {
        number: block
        for number, block in blocks.items()
        if block is not None and "experts" in dict(block.named_children())
    }


def in_order(output: RouterOutput) -> tuple[Tensor | None, Tensor, Tensor]:
    """Returns logits, weights and ids from a router's output in any order."""
    logits, weights, ids = (output[place] for place in _order(output))
    return logits, weights, ids


def in_order_of(output: RouterOutput, ordered: tuple[Tensor | None, Tensor, Tensor]) -> RouterOutput:
    """Returns logits, weights and ids in the order of a router's output."""
    by_place = dict(zip(_order(output), ordered, strict=True))
    return by_place[0], by_place[1], by_place[2]


def _order(output: RouterOutput) -> tuple[int, int, int]:
    ids = next(place for place, part in enumerate(output) if part is not None and not part.is_floating_point())
    return _ORDERS[ids]


def router_shape(num_layers: int, routers: dict[int, Any]) -> RouterShape | None:
    """Returns the shape of a model's routes, given its number of layers and all its routers; None without routers."""
    if not routers:
        return None
    router = next(iter(routers.values()))
    return RouterShape(num_layers, tuple(sorted(routers)), router.num_experts, router.top_k)


class RouterWatch:
    """Observes a part's routers during training.

    Args:
        config: weight of the auxiliary loss and rate of the bias.
        sharing: the groups of ranks that share a microbatch: cp's, tp's, both or none.
    """

    def __init__(
        self,
        layers: dict[int, Any],
        family: Family,
        scope: MicrobatchScope,
        config: MoEConfig,
        sharing: Sequence[dist.ProcessGroup],
    ):
        self.layers, self.family, self.config = layers, family, config
        self.routers = routers_of(layers, family)
        self._watched = {number: Watched(scope, bool(config.aux_loss), sharing) for number in self.routers}
        for number, router in self.routers.items():
            router.watched = self._watched[number]

    def start_step(self, num_tokens: int) -> None:
        """Starts counting for a new step. `num_tokens` of the global batch divides the auxiliary loss."""
        for number, watched in self._watched.items():
            router = self.routers[number]
            device = next(router.parameters()).device
            watched.start_step(router.num_experts, device, self.config.aux_loss / max(num_tokens, 1))

    @property
    def loads(self) -> dict[int, Tensor]:
        """This rank's token count per expert since the step began, by layer, fp32 [E]."""
        return {number: watched.load for number, watched in self._watched.items()}

    @torch.no_grad()
    def update_biases(self, loads: dict[int, Tensor]) -> None:
        """Raises the biases of experts below the mean load, and lowers those above it. `loads` are over all ranks, by
        layer."""
        for number, bias in biases_of(self.layers, self.family).items():
            load = loads[number].to(bias.device)
            bias += self.config.bias_update_rate * (load.mean() - load).sign()


class Watched:
    """Counts of one router, kept in tensors because compiled layers count within their graph.

    Attributes:
        load: token count per expert, fp32 [E].
        factor: factor of the auxiliary loss as a sum over tokens, float64 [].
    """

    def __init__(self, scope: MicrobatchScope, has_loss: bool, sharing: Sequence[dist.ProcessGroup]):
        self.scope, self.has_loss, self.sharing = scope, has_loss, sharing
        self.load = self.factor = torch.zeros(())

    def start_step(self, num_experts: int, device: torch.device, factor: float) -> None:
        if self.load.shape != (num_experts,) or self.load.device != device:
            self.load = torch.zeros(num_experts, device=device)
            self.factor = torch.zeros((), dtype=torch.float64, device=device)
        self.load.zero_()
        self.factor.fill_(factor)

    def count(self, output: RouterOutput) -> RouterOutput:
        """Counts the load of experts, and adds the auxiliary loss to the gradient of the weights in a router's
        output."""
        microbatch = self.scope.microbatch
        assert microbatch is not None, "a router runs outside a layer that records its microbatch"
        logits, weights, chosen = in_order(output)
        load = _load(chosen, microbatch.is_routed, len(self.load))
        self.load.add_(load * self.scope.is_first)
        if self.has_loss:
            assert logits is not None  # the support table rejects the loss for routers without logits
            for group in self.sharing:
                load = all_reduce(load, group)
            loss = _load_balancing(logits, load, microbatch.is_routed) * self.factor
            weights = _AddLoss.apply(weights, loss)
        return in_order_of(output, (logits, weights, chosen))


def install_router_forwards(routers: Iterable[Any]) -> None:
    """Replaces the forwards of routers that have `replayed` (mixture/router_replay.py) and `watched` set.

    The new forward is one function with its state on the router, so that identical compiled layers share a graph.
    """
    for router in routers:
        router.forward = MethodType(_forward, router)


def _forward(router: Any, *args: Any) -> Any:
    choose, routes = type(router).forward, router.replayed.routes
    output = choose(router, *args) if routes is None else router.replayed.follow(routes, router, choose, *args)
    return router.watched.count(output) if router.training and torch.is_grad_enabled() else output


def global_loads(watches: list[RouterWatch], layout: Layout) -> dict[int, Tensor]:
    """Returns the token count per expert over the ranks of this rank's stages, by layer. A collective of the stage."""
    return sum_over_stage({number: load for watch in watches for number, load in watch.loads.items()}, layout)


def sum_over_stage(by_layer: dict[int, Tensor], layout: Layout) -> dict[int, Tensor]:
    """Sums tensors of one shape over all ranks of this rank's stages, by layer, float64 on the host. A collective of
    the stage, whose ranks have the same layers."""
    if not by_layer:
        return {}
    total = torch.stack(list(by_layer.values())).double().cpu()
    combine(total, layout.stage_control)
    return dict(zip(by_layer, total, strict=True))


def load_metric(loads: dict[int, Tensor], layout: Layout) -> dict[str, float]:
    """Returns `LOAD_METRIC` over the layers of all stages, equal on every rank. A collective."""
    ratios = [(load.max() / load.mean().clamp_min(1e-9)).item() for load in loads.values()]
    total = torch.tensor([sum(ratios), len(ratios)], dtype=torch.float64)
    combine(total, layout.pp_control)
    return {LOAD_METRIC: (total[0] / total[1]).item()} if total[1] else {}


def _load(chosen: Tensor, is_real: Tensor, num_experts: int) -> Tensor:
    """Returns the number of real tokens of each expert, [E]."""
    counts = is_real[:, None].expand_as(chosen).flatten().float()
    return torch.zeros(num_experts, device=chosen.device).index_add_(0, chosen.flatten(), counts)


def _load_balancing(logits: Tensor, load: Tensor, is_real: Tensor) -> Tensor:
    """Returns this rank's summand of a layer's auxiliary loss for one microbatch, times its number of real tokens.

    The loss is E * the sum over experts of (share of the choices * mean probability).

    Args:
        logits: scores of this rank's tokens, [t, E].
        load: the whole microbatch's choices of each expert, [E].
        is_real: which of this rank's tokens count, bool [t].
    """
    real = is_real.float()[:, None]
    accurate = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probability = (accurate.softmax(-1) * real).sum(0)  # summed over tokens: the mean, times their number
    return logits.shape[-1] * (load / load.sum().clamp_min(1) * probability).sum()


class _AddLoss(torch.autograd.Function):
    """Identity that adds a scalar to the step's loss by giving it a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
