"""MLPs in tiles against whole ones."""

import weakref

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_rl.compat.compilation import outside_of_graphs
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.compiled_layers import compile_layers
from automodel_rl.model.tiled_mlp import mlps_of, tile_mlps
from tests.tiny import tiny_config

DENSE = [name for name, family in TEXT_FAMILIES.items() if not family.is_moe]


def run(layer: torch.nn.Module, hidden: Tensor) -> list[Tensor]:
    """Results and gradients of the layer's MLP."""
    (mlp,) = mlps_of(layer)
    hidden = hidden.detach().requires_grad_()
    layer.zero_grad()
    result = mlp(hidden)
    (result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    return [result.detach(), hidden.grad, *(p.grad.clone() for p in mlp.parameters())]  # type: ignore[list-item, union-attr]


@pytest.mark.parametrize("family", DENSE)
def test_every_dense_family_has_an_mlp_that_is_the_same_in_tiles(family: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(family)
    layer = AutoModelForCausalLM.from_config(config, dtype=torch.float64).model.layers[-1]
    rows = [torch.randn(1, length, config.hidden_size, dtype=torch.float64) for length in (17, 1, 5, 6, 15, 16)]
    whole = [run(layer, hidden) for hidden in rows]
    tile_mlps([layer], 5)
    torch.testing.assert_close([run(layer, hidden) for hidden in rows], whole, rtol=1e-10, atol=1e-12)


def qwen(dtype: torch.dtype) -> tuple[torch.nn.Module, int]:
    torch.manual_seed(0)
    config = tiny_config("qwen3")
    return AutoModelForCausalLM.from_config(config, dtype=dtype).model.layers[0], config.hidden_size


def test_gradients_of_weights_are_added_up_in_fp32() -> None:
    """In bfloat16 sums of 64 tiles would round away much of what they add."""
    layer, hidden_size = qwen(torch.bfloat16)
    hidden = torch.randn(1, 512, hidden_size, dtype=torch.bfloat16) + 1
    _, _, *whole = run(layer, hidden)
    tile_mlps([layer], 8)
    _, _, *tiled = run(layer, hidden)
    for one, other in zip(whole, tiled, strict=True):
        assert (one - other).float().norm() < 8e-3 * one.float().norm()


def test_only_the_input_is_kept() -> None:
    layer, hidden_size = qwen(torch.float32)
    tile_mlps([layer], 5)
    (mlp,) = mlps_of(layer)
    inner: list[weakref.ref[Tensor]] = []
    mlp.down_proj.register_forward_pre_hook(lambda _, args: inner.append(weakref.ref(args[0])))  # type: ignore[union-attr, operator]
    result = mlp(torch.randn(1, 17, hidden_size, requires_grad=True))
    assert len(inner) == 4
    assert all(dead() is None for dead in inner)
    assert result.requires_grad


def test_frozen_mlps_hand_on_gradients_and_get_none() -> None:
    layer, hidden_size = qwen(torch.float64)
    layer.requires_grad_(False)
    tile_mlps([layer], 5)
    (mlp,) = mlps_of(layer)
    hidden = torch.randn(1, 17, hidden_size, dtype=torch.float64, requires_grad=True)
    mlp(hidden).sum().backward()
    assert hidden.grad is not None
    assert all(parameter.grad is None for parameter in mlp.parameters())


def test_weights_have_gradients_though_the_input_has_none() -> None:
    layer, hidden_size = qwen(torch.float64)
    tile_mlps([layer], 5)
    (mlp,) = mlps_of(layer)
    mlp(torch.randn(1, 17, hidden_size, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputed_layer_computes_its_mlp_once_in_the_forward_and_once_in_the_backward(compiled: bool) -> None:
    """Not a third time to recompute what nobody needs. With graphs, one of a tile and two of the layer's ends."""
    layer, hidden_size = qwen(torch.float32)
    (mlp,) = mlps_of(layer)
    calls: list[int] = []
    inner = mlp.forward

    def count(hidden: Tensor) -> Tensor:
        calls.append(hidden.shape[1])
        return inner(hidden)

    mlp.forward = outside_of_graphs(count)  # type: ignore[assignment]
    tile_mlps([layer], 5, compiled)
    rotary = torch.ones(1, 17, 8), torch.zeros(1, 17, 8)
    if compiled:
        compile_layers([layer])
    checkpoint_layers([layer], "full")
    hidden = torch.randn(1, 17, hidden_size, requires_grad=True)
    layer(hidden, position_embeddings=rotary, attention_mask=None).sum().backward()
    assert calls == [5, 5, 5, 2] * 2
