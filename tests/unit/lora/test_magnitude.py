"""Lengths of rows: right without making the weight, and the same as before for an adapter that is new."""

import pytest
import torch
from torch import nn

from automodel_rl.config.model import LoraConfig
from automodel_rl.lora.add import _add_adapter
from automodel_rl.lora.layers import begin_magnitudes, install_adapters
from automodel_rl.lora.magnitude import row_lengths


def test_lengths_are_those_of_the_merged_weight() -> None:
    torch.manual_seed(0)
    weight, down, up = (torch.randn(shape, dtype=torch.float64) for shape in ((24, 40), (4, 40), (24, 4)))
    before, now = row_lengths(weight, down, up, 0.7)
    torch.testing.assert_close(before, weight.norm(dim=1), rtol=1e-13, atol=0)
    torch.testing.assert_close(now, (weight + 0.7 * up @ down).norm(dim=1), rtol=1e-13, atol=0)
    _, of_narrow = row_lengths(weight.bfloat16(), down.bfloat16(), up.bfloat16(), 0.7)
    torch.testing.assert_close(of_narrow.double(), now, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_new_adapter_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    hidden = torch.randn(8, 64, dtype=dtype)
    expected = part(hidden)
    _add_adapter(part[0], LoraConfig(rank=4, dora=True))
    nn.init.zeros_(part[0].lora_B.weight)
    begin_magnitudes(part)
    install_adapters(part)
    torch.testing.assert_close(part(hidden), expected, rtol=1e-15 if dtype == torch.float64 else 0, atol=0)
