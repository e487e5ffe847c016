"""Training the routers of a mixture: how experts are loaded, the auxiliary loss, and DeepSeek's bias.

Routers are the models' own modules, which return logits, weights and ids of the chosen experts; here they are only
watched. Pads and empty rows count for nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_rl.batch import LocalRow
from automodel_rl.config.families import Family
from automodel_rl.config.model import MoEConfig
from automodel_rl.parallel.layout import Layout

LOAD_METRIC = "moe/load_max"
"""The largest load of an expert relative to the mean, averaged over layers; 1 is even."""


class RouterWatch:
    """Watches the routers of a part while it trains.

    Args:
        layers: decoder layers of the part, by number.
        family: which module is the router.
        config: weight of the auxiliary loss and rate of the bias.
    """

    def __init__(self, layers: dict[int, Any], family: Family, config: MoEConfig):
        self.config = config
        self.routers: dict[int, Any] = {}
        self.loads: dict[int, Tensor] = {}
        self.num_tokens = 1
        self._row: LocalRow | None = None
        self._counted: set[tuple[int, int]] = set()
        for number, layer in layers.items():
            if "experts" not in dict(layer.mlp.named_children()):
                continue
            self.routers[number] = getattr(layer.mlp, family.router)
            self._follow_rows(layer)
            self._watch(number, self.routers[number])

    def start_step(self, num_tokens: int) -> None:
        """Args: num_tokens, of the global batch, which the auxiliary loss is divided by."""
        self.num_tokens = max(num_tokens, 1)
        self.loads, self._counted = {}, set()

    def _follow_rows(self, layer: Any) -> None:
        """Inside the layer's forward, so that a recomputation knows its row, too."""
        inner = layer.forward

        def forward(*args: Any, row: LocalRow, **kwargs: Any) -> Any:
            self._row = row
            return inner(*args, row=row, **kwargs)

        layer.forward = forward

    def _watch(self, number: int, router: nn.Module) -> None:
        def hook(module: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return output
            assert self._row is not None
            logits, weights, chosen = output
            load = _load(chosen, self._row.is_real, logits.shape[-1])
            if (number, id(self._row)) not in self._counted:  # a recomputation counts nothing twice
                self._counted.add((number, id(self._row)))
                self.loads[number] = self.loads.get(number, 0) + load
            if self.config.aux_loss:
                loss = _load_balancing(logits, load, self._row.is_real) * (self.config.aux_loss / self.num_tokens)
                weights = _AddLoss.apply(weights, loss)
            return logits, weights, chosen

        router.register_forward_hook(hook)

    @torch.no_grad()
    def update_biases(self, loads: dict[int, Tensor]) -> None:
        """Raises the biases of experts with less load than the mean, lowers the others'.

        Args:
            loads: by layer, over all ranks.
        """
        for number, router in self.routers.items():
            load = loads[number].to(router.e_score_correction_bias.device)
            router.e_score_correction_bias += self.config.bias_update_rate * (load.mean() - load).sign()


def global_loads(watches: list[RouterWatch], layout: Layout) -> dict[int, Tensor]:
    """Tokens of every expert by layer, over all ranks of this rank's stages, on the host. A collective of the stage."""
    own = {number: load for watch in watches for number, load in watch.loads.items()}
    if not own:
        return {}
    total = torch.stack(list(own.values())).double().cpu()
    dist.all_reduce(total, group=layout.stage_control)
    return dict(zip(own, total, strict=True))


def load_metric(loads: dict[int, Tensor], layout: Layout) -> dict[str, float]:
    """`LOAD_METRIC` over the layers of all stages, equal on every rank. A collective."""
    ratios = [(load.max() / load.mean().clamp_min(1e-9)).item() for load in loads.values()]
    total = torch.tensor([sum(ratios), len(ratios)], dtype=torch.float64)
    dist.all_reduce(total, group=layout.pp_control)
    return {LOAD_METRIC: (total[0] / total[1]).item()} if total[1] else {}


def _load(chosen: Tensor, is_real: Tensor, num_experts: int) -> Tensor:
    """Real tokens of every expert, [E]."""
    counts = is_real[:, None].expand_as(chosen).flatten().float()
    return torch.zeros(num_experts, device=chosen.device).index_add_(0, chosen.flatten(), counts)


def _load_balancing(logits: Tensor, load: Tensor, is_real: Tensor) -> Tensor:
    """E * sum over experts of their share of choices and their mean probability, times the real tokens of the row."""
    real = is_real.float()[:, None]
    probability = (logits.float().softmax(-1) * real).sum(0)  # summed over tokens: the mean, times their number
    return logits.shape[-1] * (load / load.sum().clamp_min(1) * probability).sum()


class _AddLoss(torch.autograd.Function):
    """Passes a tensor through, and gives a scalar a gradient of one: it is added to the loss of the step."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
