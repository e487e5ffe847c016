"""Steps written here: in parts, compiled, and with weights in bfloat16."""

import pytest
import torch
from torch import Tensor, nn

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.config import OptimizerConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.optimizers import OPTIMIZERS, ModelOptimizer, adamw, adamw_8bit, own_steps
from tests.unit.optimizers.test_model_optimizer import no_groups

MODULES = {"adamw": adamw, "adamw_8bit": adamw_8bit}
NAMES = pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def linear(columns: int, rows: int, dtype: torch.dtype) -> nn.Linear:
    """A linear layer whose gradients are float32."""
    torch.manual_seed(0)
    model = nn.Linear(columns, rows).to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


def optimizer_of(model: nn.Module, config: OptimizerConfig) -> ModelOptimizer:
    return ModelOptimizer([(model, no_groups, config)], OPTIMIZERS, config.lr)


def weights_after_steps(name: OptimizerName, dtype: torch.dtype) -> Tensor:
    model, config = linear(256, 24, dtype), OptimizerConfig(name=name, lr=1e-2)
    optimizer = optimizer_of(model, config)
    for step in range(3):
        torch.manual_seed(step)
        model.weight.grad, model.bias.grad = torch.randn(24, 256), torch.randn(24)
        optimizer.step(config.lr)
    return torch.cat([model.weight.detach().flatten(), model.bias.detach()])


@DTYPES
@NAMES
def test_a_step_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch, name: OptimizerName, dtype: torch.dtype) -> None:
    whole = weights_after_steps(name, dtype)
    monkeypatch.setattr(own_steps, "MAX_VALUES", 7 * 256)
    assert torch.equal(weights_after_steps(name, dtype), whole)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", torch.bfloat16), ("adamw_8bit", torch.bfloat16), ("adamw_8bit", torch.float32)],
    ids=str,
)
def test_a_compiled_step_is_the_same(monkeypatch: pytest.MonkeyPatch, name: OptimizerName, dtype: torch.dtype) -> None:
    """On a GPU steps are compiled, once for all sizes of rows in whole blocks."""
    whole = weights_after_steps(name, dtype)
    monkeypatch.setattr(MODULES[name], "step_of_rows", compile_for_any_size(MODULES[name].step_of_rows))
    found = weights_after_steps(name, dtype)
    if dtype == torch.bfloat16:  # a last bit of float32 may turn the rounding of a few
        assert (found != whole).float().mean() < 1e-3
    else:
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)


def loss_after(name: OptimizerName, dtype: torch.dtype, lr: float) -> float:
    """The loss of a least-squares problem after 300 steps that are small beside the weights."""
    torch.manual_seed(1)
    inputs, right = torch.randn(512, 128), torch.randn(64, 128)
    targets = inputs @ (right + 0.05 * torch.randn(64, 128)).T
    model, config = linear(128, 64, dtype), OptimizerConfig(name=name, lr=lr)
    model.weight.data.copy_(right)
    optimizer = optimizer_of(model, config)
    for _ in range(300):
        weight = model.weight.detach().float().requires_grad_()
        loss = (inputs @ weight.T - targets).square().mean()
        (model.weight.grad,) = torch.autograd.grad(loss, weight)
        model.bias.grad = torch.zeros(64)
        optimizer.step(config.lr)
    return (inputs @ model.weight.detach().float().T - targets).square().mean().item()


@NAMES
def test_weights_in_bfloat16_learn_by_small_steps(monkeypatch: pytest.MonkeyPatch, name: OptimizerName) -> None:
    wide, narrow = (loss_after(name, dtype, 3e-4) for dtype in (torch.float32, torch.bfloat16))
    monkeypatch.setattr(own_steps, "round_to_bfloat16", lambda values, bits: values.to(torch.bfloat16))
    nearest = loss_after(name, torch.bfloat16, 3e-4)
    assert wide < narrow < wide + 0.01 < nearest - 0.05, (wide, narrow, nearest)


def test_moments_are_as_wide_as_gradients() -> None:
    model = linear(128, 4, torch.bfloat16)
    names = OPTIMIZERS["adamw"].state_names(model)["weight"]
    assert {tensor.dtype for tensor in names.empty(model.weight).values()} == {torch.float32}
    assert sum(names.sizes(model.weight)) == 4 + 2 * 4 * 128 * 4
