"""What training changes, copied to the host: so that several trainings can take turns on one model."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import ModelOptimizer
from automodel_rl.parallel.sharding import local_tensor

Shards = dict[str, Tensor]
"""This rank's shards by the names of their parameters, on the host."""


@dataclass
class TrainedState:
    """The state of one training on one rank.

    Attributes:
        weights: trained weights.
        gradients: gradients that are added up, of parameters that have some.
        moments: the optimizer's tensors for each parameter, by their names there; none for one that took no step yet.
        step: number of optimizer steps.
        has_gradients: whether a forward and backward has come since the last optimizer step.
    """

    weights: Shards
    gradients: Shards
    moments: dict[str, Shards]
    step: int = 0
    has_gradients: bool = False

    @torch.no_grad()
    def put(self, handle: ModelHandle, optimizer: ModelOptimizer) -> None:
        """Copies the state into a model and its optimizer.

        Args:
            handle: the model.
            optimizer: trains it; its moments are on the device.
        """
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
        """Adds the weights and gradients of the state to the weights and gradients of a model."""
        for name, parameter in trained_parameters(handle):
            weight = local_tensor(parameter.detach())
            weight.add_(self.weights[name].to(weight.device, non_blocking=True))
            gradient, before = self.gradients.get(name), parameter.grad
            if gradient is not None and before is None:
                parameter.grad = _like(parameter, gradient)
            elif gradient is not None and before is not None:
                local_tensor(before).add_(gradient.to(weight.device, non_blocking=True))


@torch.no_grad()
def take_state(handle: ModelHandle, optimizer: ModelOptimizer, step: int, has_gradients: bool) -> TrainedState:
    """Copies the state of a model and its optimizer to the host.

    Args:
        handle: the model.
        optimizer: trains it.
        step: number of optimizer steps.
        has_gradients: whether there are gradients.
    """
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
    """All trained parameters of this rank with their names in a `TrainedState`, both copies of a tied one."""
    return [
        (f"{component.name}.{name}", parameter)
        for component in handle.components
        for name, parameter in component.every_parameter()
        if parameter.requires_grad
    ]


def on_host(tensor: Tensor) -> Tensor:
    """A copy of this rank's shard on the host, there after `wait_for_host`. It is pinned, so that copies take the speed
    of the link."""
    shard = local_tensor(tensor.detach())
    return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda).copy_(shard, non_blocking=True)


def wait_for_host() -> None:
    """Waits until all copies to the host are there."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """A gradient of a parameter's layout with the values of a shard."""
    gradient = torch.zeros_like(parameter, dtype=shard.dtype)  # master weights may be narrower
    local_tensor(gradient).copy_(shard, non_blocking=True)
    return gradient
