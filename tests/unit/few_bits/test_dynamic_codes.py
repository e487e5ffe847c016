"""8-bit codes of moments against those of bitsandbytes."""

import bitsandbytes.functional
import pytest
import torch

from automodel_rl.few_bits.dynamic_codes import BLOCK, SIGNED, UNSIGNED, decode, encode
from automodel_rl.optimizers.adamw_8bit_reference import rounded, tree_values


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_values_are_those_of_bitsandbytes(is_signed: bool) -> None:
    values = torch.tensor(SIGNED if is_signed else UNSIGNED, dtype=torch.float64)
    torch.testing.assert_close(values, bitsandbytes.functional.create_dynamic_map(signed=is_signed).double())
    torch.testing.assert_close(values, tree_values(int(is_signed)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("columns", [2 * BLOCK, 3 * BLOCK + 5, 7])
def test_each_value_is_rounded_to_the_nearest_in_its_block(is_signed: bool, columns: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 5, columns, dtype=torch.float64) ** 3
    values = values if is_signed else values.abs()
    codes, scales = encode(values, is_signed)
    assert (codes.dtype, codes.shape, scales.dtype) == (torch.uint8, values.shape, torch.float32)
    assert scales.shape == (3, 5, -(-columns // BLOCK))
    expected = rounded(values, tree_values(int(is_signed)))
    torch.testing.assert_close(decode(codes, scales, is_signed, torch.float64), expected, rtol=1e-7, atol=0)


def test_parts_of_rows_have_the_codes_of_the_whole() -> None:
    torch.manual_seed(0)
    values = torch.randn(6, 4 * BLOCK)
    codes, scales = encode(values, is_signed=True)
    for rows, columns in ((slice(0, 1), slice(None)), (slice(2, 6), slice(2 * BLOCK, None))):
        blocks = slice(0 if columns.start is None else columns.start // BLOCK, None)
        part, of_part = encode(values[rows, columns], is_signed=True)
        assert torch.equal(part, codes[rows, columns])
        assert torch.equal(of_part, scales[rows, blocks])


def test_zeros_stay_zero() -> None:
    codes, scales = encode(torch.zeros(2, BLOCK), is_signed=False)
    assert not decode(codes, scales, False, torch.float32).any()
    assert not decode(torch.zeros_like(codes), torch.zeros_like(scales), True, torch.float32).any()
