"""8-bit codes of moments against those of bitsandbytes."""

import bitsandbytes.functional
import pytest
import torch

from automodel_rl.optimizers.adamw_8bit_reference import rounded, tree_values
from automodel_rl.quantized.dynamic_codes import BLOCK, SIGNED, UNSIGNED, decode, encode, thresholds


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_values_are_those_of_bitsandbytes(is_signed: bool) -> None:
    values = torch.tensor(SIGNED if is_signed else UNSIGNED, dtype=torch.float64)
    torch.testing.assert_close(values, bitsandbytes.functional.create_dynamic_map(signed=is_signed).double())
    torch.testing.assert_close(values, tree_values(int(is_signed)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("columns", [2 * BLOCK, 3 * BLOCK + 5, 7])
def test_each_value_becomes_one_of_its_neighbours_by_the_step_s_threshold(is_signed: bool, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 5, columns, dtype=torch.float64) ** 3
    values = values if is_signed else values.abs()
    codes, scales = encode(values, is_signed, thresholds(3))
    assert (codes.dtype, codes.shape, scales.dtype) == (torch.uint8, values.shape, torch.float32)
    assert scales.shape == (3, 5, -(-columns // BLOCK))
    expected = rounded(values, tree_values(int(is_signed)), step=3)
    torch.testing.assert_close(decode(codes, scales, is_signed, torch.float64), expected, rtol=1e-7, atol=0)


def test_values_are_right_on_average_over_steps() -> None:
    torch.manual_seed(0)
    values = torch.rand(4, BLOCK, dtype=torch.float64) * 2 - 1
    decoded = [decode(*encode(values, True, thresholds(step)), True, torch.float64) for step in range(500)]
    torch.testing.assert_close(torch.stack(decoded).mean(0)[values > -0.99], values[values > -0.99], rtol=0, atol=2e-4)


def test_parts_of_rows_have_the_codes_of_the_whole() -> None:
    torch.manual_seed(0)
    values, above = torch.randn(6, 4 * BLOCK), thresholds(1).float()
    codes, scales = encode(values, True, above)
    for rows, columns in ((slice(0, 1), slice(None)), (slice(2, 6), slice(2 * BLOCK, None))):
        blocks = slice(0 if columns.start is None else columns.start // BLOCK, None)
        part, of_part = encode(values[rows, columns], True, above)
        assert torch.equal(part, codes[rows, columns])
        assert torch.equal(of_part, scales[rows, blocks])


def test_zeros_stay_zero() -> None:
    codes, scales = encode(torch.zeros(2, BLOCK), False, thresholds(0).float())
    assert not decode(codes, scales, False, torch.float32).any()
    assert not decode(torch.zeros_like(codes), torch.zeros_like(scales), True, torch.float32).any()
