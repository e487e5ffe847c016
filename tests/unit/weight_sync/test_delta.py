"""Deltas make the version after from the one before, bit for bit, and hold nothing else."""

import pytest
import torch
from torch import Tensor

from automodel_rl.weight_sync.delta import bits_of, changes_of, delta_of, num_changed


def apply(numbers: Tensor, delta: bytes) -> None:
    """Makes the version after from the one before, in place."""
    bits = bits_of(numbers)
    indices, differences = changes_of(delta, len(bits), bits.itemsize)
    bits[indices] ^= differences


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 8, 1001])
def test_a_delta_makes_the_version_after(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    before = torch.randn(size, dtype=torch.float64).to(dtype)
    after = torch.where(torch.rand(size) < 0.3, before * 1.01, before)
    after[0] = -0.0 if before[0] == 0 else float("nan")
    delta = delta_of(before, after)
    assert delta is not None
    differ = (before.view(torch.uint8).view(size, -1) != after.view(torch.uint8).view(size, -1)).any(1).sum()
    assert num_changed(delta, size, dtype.itemsize) == differ
    apply(before, delta)
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_numbers_are_compared_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_rl.weight_sync.delta.STRETCH", 16)
    before = torch.arange(50, dtype=torch.float32)
    after = before.clone()
    after[[0, 15, 16, 31, 49]] += 1
    delta = delta_of(before, after)
    assert delta is not None
    indices, _ = changes_of(delta, 50, 4)
    assert indices.tolist() == [0, 15, 16, 31, 49]
    apply(before, delta)
    assert torch.equal(before, after)


def test_signs_of_zero_and_bits_of_nan_are_changes() -> None:
    zeros = torch.zeros(3, dtype=torch.bfloat16)
    assert num_changed(delta_of(zeros, -zeros), 3, 2) == 3
    nan = torch.tensor([float("nan")])
    assert delta_of(nan, nan.clone()) is None


def test_a_delta_of_another_size_is_refused() -> None:
    delta = delta_of(torch.zeros(9), torch.ones(9))
    assert delta is not None
    with pytest.raises(ValueError, match="does not fit 20 numbers"):
        apply(torch.zeros(20), delta)
