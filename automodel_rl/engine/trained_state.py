"""Host copies of everything that training changes, so that several trainings can alternate on one model."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import ModelOptimizer
from automodel_rl.parallel.sharding import local_tensor

Shards = dict[str, Tensor]
"""This rank's shards on the host, by parameter name."""


@dataclass
class TrainedState:
    """The state of one training on one rank.

    Attributes:
        gradients: accumulated gradients, of parameters that have some.
        moments: the optimizer's tensors by parameter and by their names there; none before a parameter's first step.
        step: number of optimizer steps.
        has_gradients: whether there was a forward and backward since the last optimizer step.
    """

    weights: Shards
    gradients: Shards
    moments: dict[str, Shards]
    step: int = 0
    has_gradients: bool = False

    @torch.no_grad()
    def put(self, handle: ModelHandle, optimizer: ModelOptimizer) -> None:
        """Copies the state into a model and its optimizer, whose moments are on the device."""
        for name, parameter in trained_parameters(handle):
            local_tensor(parameter.detach()).copy_(self.weights[name], non_blocking=True)
            gradient = self.gradients.get(name)
            parameter.grad = None if gradient is None else _like(parameter, gradient)
            state = optimizer.empty_state(parameter)
            for key, value in self.moments.get(name, {}).items():
                local_tensor(state[key]).copy_(value, non_blocking=True)
            optimizer.set_state(parameter, state)

    @torch.no_grad()
    def add(self, handle: ModelHandle) -> None:
        """Adds the state's weights and gradients to a model's."""
        for name, parameter in trained_parameters(handle):
            weight = local_tensor(parameter.detach())
            weight.add_(self.weights[name].to(weight.device, non_blocking=True))
            gradient, before = self.gradients.get(name), parameter.grad
            if gradient is not None and before is None:
                parameter.grad = _like(parameter, gradient)
            elif gradient is not None and before is not None:
                local_tensor(before).add_(gradient.to(weight.device, non_blocking=True))


@torch.no_grad()
def snapshot_state(handle: ModelHandle, optimizer: ModelOptimizer, step: int, has_gradients: bool) -> TrainedState:
    """Copies the state of a model and its optimizer to the host."""
    trained = trained_parameters(handle)
    state = TrainedState(
        {name: on_host(parameter) for name, parameter in trained},
        {name: on_host(parameter.grad) for name, parameter in trained if parameter.grad is not None},
        {
            name: {key: on_host(value) for key, value in optimizer.state_of(parameter).items()}
            for name, parameter in trained
            if optimizer.has_state(parameter)
        },
        step,
        has_gradients,
    )
    wait_for_host()
    return state


def trained_parameters(handle: ModelHandle) -> list[tuple[str, nn.Parameter]]:
    """Returns this rank's trained parameters with their names in a `TrainedState`, including both copies of a tied
    one."""
    return [
        (f"{component.name}.{name}", parameter)
        for component in handle.components
        for name, parameter in component.every_parameter()
        if parameter.requires_grad
    ]


def on_host(tensor: Tensor) -> Tensor:
    """Starts copying this rank's shard to the host, pinned for speed. The copy is complete after `wait_for_host`."""
    shard = local_tensor(tensor.detach())
    return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda).copy_(shard, non_blocking=True)


def wait_for_host() -> None:
    """Waits for all copies to the host."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """Returns a gradient with a parameter's layout and a shard's values."""
    gradient = torch.zeros_like(parameter, dtype=shard.dtype)  # master weights may be narrower
    local_tensor(gradient).copy_(shard, non_blocking=True)
    return gradient
