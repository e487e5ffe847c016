"""Lengths of rows: right without making the weight, above 0, and without effect in an adapter that is new."""

import pytest
import torch
from torch import nn

from automodel_rl.config.model import LoraConfig
from automodel_rl.lora.add import _add_adapter
from automodel_rl.lora.layers import initialise, initialise_magnitudes, install_adapters
from automodel_rl.lora.magnitude import row_lengths
from automodel_rl.lora.rank import cut_to_rank


def test_lengths_are_those_of_the_merged_weight() -> None:
    torch.manual_seed(0)
    weight, down, up = (torch.randn(shape, dtype=torch.float64) for shape in ((24, 40), (4, 40), (24, 4)))
    found = row_lengths(weight, down, up, 0.7)
    torch.testing.assert_close(found, (weight + 0.7 * up @ down).norm(dim=1), rtol=1e-13, atol=0)
    narrow = row_lengths(weight.bfloat16(), down.float(), up.float(), 0.7)
    torch.testing.assert_close(narrow.double(), found, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_new_adapter_changes_nothing_and_rows_of_zeros_stay(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    with torch.no_grad():
        part[0].weight[3] = 0
    hidden = torch.randn(8, 64, dtype=dtype)
    expected = part(hidden)
    _add_adapter(part[0], LoraConfig(rank=4, dora=True))
    for name in ("lora_A", "lora_B", "lora_magnitude_vector"):
        part[0].get_submodule(name).to(torch.promote_types(dtype, torch.float32))
    nn.init.zeros_(part[0].lora_B.weight)
    initialise_magnitudes(part)
    install_adapters(part)
    rtol = {torch.bfloat16: 0.0, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(part(hidden), expected, rtol=rtol, atol=0)


def test_nothing_takes_lengths_for_an_adapter_of_some_rank() -> None:
    name = "model.layers.0.q_proj.lora_magnitude_vector.weight"
    with pytest.raises(ValueError, match="begins without the checkpoint's weights"):
        initialise(name, torch.empty(4))
    with pytest.raises(ValueError, match="has no rank dim"):
        cut_to_rank(name, torch.empty(8), slice(0, 4))
