"""What a checksum notices."""

import pytest
import torch

from automodel_rl.weight_sync import checksum as sums
from automodel_rl.weight_sync.delta import bits_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8])
def test_it_notices_every_bit_and_every_exchange(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 255, (64 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = bits.view(dtype)
    whole = sums.checksum(tensor)
    for place in range(len(bits)):
        changed = bits.clone()
        changed[place] ^= 1 << (place % 8)
        assert sums.checksum(changed.view(dtype)) != whole
    for place in range(63):
        order = torch.arange(64)
        order[[place, place + 1]] = order[[place + 1, place]]
        exchanged = tensor[order]
        same = torch.equal(exchanged.view(torch.uint8), bits)
        assert (sums.checksum(exchanged) == whole) == same


def test_stretches_add_up_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(101, dtype=torch.float64)
    whole = sums.checksum(tensor)
    expected = sum(int(bits) * (2 * place + 1) for place, bits in enumerate(tensor.view(torch.int64))) % 2**64
    assert int(whole) % 2**64 == expected
    monkeypatch.setattr("automodel_rl.weight_sync.checksum.ROW", 7)
    assert sums.checksum(tensor) == whole
    assert sums.checksum(tensor[:40]) + sums.checksum(tensor[40:], start=40) == whole
    assert sums.checksum(tensor[:0]) == 0
    assert sums.checksum(torch.tensor(3.0)) == sums.checksum(torch.tensor([3.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_it_follows_changes(dtype: torch.dtype) -> None:
    before = torch.randint(0, 255, (300 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    after = before.clone()
    indices = torch.tensor([0, 7, 299])
    after.view(torch.uint8).view(300, -1)[indices] ^= 129
    old, new = (bits_of(numbers)[indices.numpy()] for numbers in (before, after))
    change = sums.change_of_checksum(old, new, indices.numpy() + 1000)
    assert (int(sums.checksum(before, 1000)) + change - int(sums.checksum(after, 1000))) % 2**64 == 0


def test_nan_and_minus_zero_are_bits_as_others() -> None:
    assert sums.checksum(torch.tensor([float("nan")])) == sums.checksum(torch.tensor([float("nan")]))
    assert sums.checksum(torch.tensor([0.0])) != sums.checksum(torch.tensor([-0.0]))
