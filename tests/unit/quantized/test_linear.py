"""Products with frozen weights in nf4: what they keep."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from automodel_rl.quantized.linear import quantized_product
from automodel_rl.quantized.nf4 import quantize


def in_nf4(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(torch.randn(outputs, inputs))
    return codes, scales.view(torch.uint8)


def kept(function: Callable[[Tensor], Tensor]) -> list[tuple[int, ...]]:
    """Shapes of what is kept for the backward, which runs."""
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(torch.randn(100, 64, requires_grad=True))
    result.sum().backward()
    return shapes


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputed_graph_keeps_its_input_codes_and_scales(compiled: bool) -> None:
    """No product, which torch 2.11 kept if an autograd function made it."""
    torch.manual_seed(0)
    up, down = in_nf4(128, 64), in_nf4(64, 128)

    def mlp(hidden: Tensor) -> Tensor:
        between = quantized_product(hidden, *up, "nf4", torch.float32, transposed=True)
        return hidden + quantized_product(F.silu(between) * between, *down, "nf4", torch.float32, transposed=True)

    def recomputed(hidden: Tensor) -> Tensor:
        return checkpoint(mlp, hidden, use_reentrant=False)

    function = torch.compile(recomputed, backend="aot_eager_decomp_partition") if compiled else recomputed
    assert set(kept(function)) <= {(0,), (100, 64), *(tuple(part.shape) for part in (*up, *down))}
