"""fp8 layers: close to the exact ones, with the same parameters, and refused where products cannot be made."""

import functools

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from automodel_rl.config.model import Float8
from automodel_rl.errors import InputError
from automodel_rl.model.float8 import check_float8, install_float8


class Block(nn.Module):
    def __init__(self, inner: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, inner, bias=False), nn.Linear(inner, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden))


def emulated(module: nn.Module, config: Float8LinearConfig) -> nn.Module:
    object.__setattr__(config, "emulate", True)  # a CPU has no fp8 products
    return convert_to_float8_training(module, config=config)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_fp8_layers_are_close_and_keep_their_parameters(monkeypatch: pytest.MonkeyPatch, recipe: Float8) -> None:
    monkeypatch.setattr("torchao.float8.convert_to_float8_training", emulated)
    torch.manual_seed(0)
    block, hidden = Block().bfloat16(), torch.randn(16, 32).bfloat16()
    parameters = dict(block.named_parameters())
    results = []
    for install in (lambda _: None, functools.partial(install_float8, recipe=recipe)):
        install([block])
        inputs = hidden.clone().requires_grad_()
        output = block(inputs)
        output.float().square().sum().backward()
        results.append([output, inputs.grad, block.up.weight.grad])
        block.zero_grad()
    assert dict(block.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in block.named_parameters())
    for found, expected in zip(*reversed(results), strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert 1e-3 < error < 0.1  # not the same, so fp8 was used


def test_sizes_that_fp8_products_do_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="model.fp8=rowwise: up has 32 inputs and 40 outputs, and fp8 products need"):
        install_float8([Block(40)], "rowwise")


def test_devices_without_fp8_are_refused() -> None:
    with pytest.raises(
        InputError, match="model.fp8=tensorwise needs a GPU with fp8, such as H100, and this rank has none"
    ):
        check_float8("tensorwise", torch.device("cpu"))
