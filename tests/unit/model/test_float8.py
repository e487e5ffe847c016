"""fp8 layers: close to the exact ones, with the same parameters, and refused where products cannot be made."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from automodel_rl.config.model import Float8, LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.lora.add import add_adapters
from automodel_rl.lora.layers import install_adapters
from automodel_rl.model.float8 import check_float8, install_float8


class Block(nn.Module):
    def __init__(self, inner: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, inner, bias=False), nn.Linear(inner, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden))


def emulated(module: nn.Module, config: Float8LinearConfig, **options: Any) -> nn.Module:
    object.__setattr__(config, "emulate", True)  # a CPU has no fp8 products
    return convert_to_float8_training(module, config=config, **options)


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


class Adapted(nn.Module):
    """Blocks whose first linear layer has an adapter of a rank that is no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.config = Block(), SimpleNamespace(model_type="qwen3", tie_word_embeddings=False)

    def adapt(self) -> None:
        add_adapters(self, LoraConfig(rank=4, targets=("up",)))
        nn.init.normal_(self.block.up.lora_B.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.block(hidden)


def test_adapters_of_fp8_layers_stay_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchao.float8.convert_to_float8_training", emulated)
    torch.manual_seed(0)
    model, hidden = Adapted().bfloat16(), torch.randn(16, 32).bfloat16()
    model.adapt()
    up, results = copy.deepcopy(model), []
    for fp8 in (False, True):
        parameters = dict(model.named_parameters())
        if fp8:
            install_float8([model], "rowwise")
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        install_adapters(model)
        inputs = hidden.clone().requires_grad_()
        output = model(inputs)
        output.float().square().sum().backward()
        assert model.block.up.weight.grad is None
        adapter = model.block.up
        results.append([output, inputs.grad, adapter.lora_A.weight.grad, adapter.lora_B.weight.grad])
        model = up
    for found, expected in zip(*reversed(results), strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert 1e-3 < error < 0.1


def test_sizes_that_fp8_products_do_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="model.fp8=rowwise: up has 32 inputs and 40 outputs, but fp8 products need"):
        install_float8([Block(40)], "rowwise")


def test_devices_without_fp8_are_refused() -> None:
    with pytest.raises(
        InputError, match="model.fp8=tensorwise needs a GPU with fp8, such as H100, but this rank has none"
    ):
        check_float8("tensorwise", torch.device("cpu"))
