"""All optimizers of this rank's parts as one: steps, and the state for checkpoints and for offloading."""

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
    """Settings of AdamW for a step, in place of those of a config and its schedule.

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
    """Trains parts of a model as descriptions say.

    Args:
        parts: this rank's parts, each with the groups of its layout and the settings of its optimizer; only parameters
            that are trained count.
        descriptions: describe the kinds of optimizers, by name.
        peak: the peak of the learning rate that `step` gets. Optimizers with another peak follow it in proportion.

    Attributes:
        state_names: names of the state of every parameter that it trains.
        optimizers: torch's optimizers, each of which trains some parameters.
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
        """Takes one optimizer step with the gradients that are there. A collective of each part's ranks.

        Args:
            lr: the learning rate of the schedule.
        """
        for group in self.groups:
            group["lr"] = lr * group[LR_FACTOR]
        for optimizer in self.optimizers:
            optimizer.step()

    def adopt(self, settings: AdamWSettings) -> None:
        """Uses these settings from now on.

        Args:
            settings: settings of AdamW. What never decays goes on without weight decay.

        Raises:
            ValueError: some parameters are trained by another optimizer.
        """
        if any(DECAYS not in group for group in self.groups):
            raise ValueError("settings of AdamW for a step need optimizer.name adamw or adamw_8bit, for all weights")
        for group in self.groups:
            decay = settings.weight_decay if group[DECAYS] else 0.0
            group.update(betas=settings.betas, eps=settings.eps, weight_decay=decay)

    def moments(self) -> Iterator[Tensor]:
        """The moments of all parameters that have taken a step, and their scales."""
        for parameter, names in self.state_names.items():
            state = self._optimizer_of[parameter].state.get(parameter, {})
            yield from (state[name] for name in names.tensors if name in state)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter, by the names in `state_names`; all 0 before its first step.

        Args:
            parameter: one that is trained.

        Returns:
            The moments themselves, like the parameter, and a copy of its count of steps, fp32 [].
        """
        state = self._optimizer_of[parameter].state.get(parameter) or self.empty_state(parameter)
        names = self.state_names[parameter]
        count = {COUNT: state[COUNT].detach().clone()} if names.counts else {}
        return count | {name: state[name] for name in names.tensors}

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A new state, all 0, as of a parameter that has taken no step.

        Args:
            parameter: one that is trained.
        """
        return self.state_names[parameter].empty(parameter)

    def has_state(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has taken a step, or been given a state."""
        return bool(self._optimizer_of[parameter].state.get(parameter))

    def set_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
        """Gives a parameter a state, without copying its moments.

        Args:
            parameter: one that is trained.
            state: a state such as `state_of` gives.
        """
        optimizer = self._optimizer_of[parameter]
        count = {}
        if COUNT in state:  # a fused optimizer counts on the device
            count = {COUNT: state[COUNT].to(parameter.device) if optimizer.defaults["fused"] else state[COUNT].cpu()}
        optimizer.state[parameter] = {**state, **count}
