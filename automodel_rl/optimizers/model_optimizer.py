"""All optimizers of this rank's parts as one: steps, and the state for checkpoints and offloading."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.optimizers.description import COUNT, DECAYS, LR_FACTOR, OptimizerDescription, StateNames
from automodel_rl.parallel.whole_matrices import GroupOf


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW settings for a step, in place of those of config and schedule.

    Attributes:
        lr: learning rate.
        betas, eps, weight_decay, max_grad_norm: as in `OptimizerConfig`.

    Example:
        >>> AdamWSettings(lr=1e-4).max_grad_norm is None
        True
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


class ModelOptimizer:
    """Trains the parts of a model.

    Args:
        parts: this rank's parts, each with the groups of its layout and its optimizer's settings.
        peak: peak of the learning rate passed to `step`. Optimizers with another peak scale it in proportion.
    """

    def __init__(
        self,
        parts: Iterable[tuple[nn.Module, GroupOf, OptimizerConfig]],
        descriptions: Mapping[OptimizerName, OptimizerDescription],
        peak: float,
    ):
        self.state_names: dict[nn.Parameter, StateNames] = {}
        self._optimizer_of: dict[nn.Parameter, torch.optim.Optimizer] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        for part, group_of, config in parts:
            description = descriptions[config.name]
            named = dict(part.named_parameters(remove_duplicate=False))
            self.state_names |= {named[name]: names for name, names in description.state_names(part).items()}
            built = description.build(part, config, group_of)
            for group in (group for optimizer in built for group in optimizer.param_groups):
                group[LR_FACTOR] *= 1.0 if config.lr == peak else config.lr / peak
            self.optimizers += built
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                self._optimizer_of |= dict.fromkeys(group["params"], optimizer)
        assert self._optimizer_of.keys() == self.state_names.keys()

    @property
    def groups(self) -> list[dict]:
        """torch's parameter groups, with their settings."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, lr: float) -> None:
        """Takes one optimizer step at the schedule's learning rate. A collective of each part's ranks."""
        for group in self.groups:
            group["lr"] = lr * group[LR_FACTOR]
        for optimizer in self.optimizers:
            optimizer.step()

    def adopt(self, settings: AdamWSettings) -> None:
        """Uses these AdamW settings from now on. Parameters that never decay keep no weight decay.

        Raises:
            ValueError: another optimizer trains some parameters.
        """
        if any(DECAYS not in group for group in self.groups):
            raise ValueError("AdamW settings for a step need optimizer.name adamw or adamw_8bit for all weights")
        for group in self.groups:
            decay = settings.weight_decay if group[DECAYS] else 0.0
            group.update(betas=settings.betas, eps=settings.eps, weight_decay=decay)

    def moments(self) -> Iterator[Tensor]:
        """Yields moments and scales of all parameters that have taken a step."""
        for parameter, names in self.state_names.items():
            state = self._optimizer_of[parameter].state.get(parameter, {})
            yield from (state[name] for name in names.tensors if name in state)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns a trained parameter's state by the names in `state_names`: the moments themselves, and a copy of
        the step count, fp32 []. All 0 before its first step."""
        state = self._optimizer_of[parameter].state.get(parameter) or self.empty_state(parameter)
        names = self.state_names[parameter]
        count = {COUNT: state[COUNT].detach().clone()} if names.counts else {}
        return count | {name: state[name] for name in names.tensors}

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state of a trained parameter that has taken no step: zeros."""
        return self.state_names[parameter].empty(parameter)

    def has_state(self, parameter: nn.Parameter) -> bool:
        """Returns whether a parameter has taken a step, or been given a state."""
        return bool(self._optimizer_of[parameter].state.get(parameter))

    def set_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Sets a trained parameter's state, as from `state_of`, without copying its moments."""
        optimizer = self._optimizer_of[parameter]
        count = {}
        if COUNT in state:  # a fused optimizer counts on the device
            count = {COUNT: state[COUNT].to(parameter.device) if optimizer.defaults["fused"] else state[COUNT].cpu()}
        optimizer.state[parameter] = {**state, **count}
