"""Rounding to bfloat16 is right on average, the same in every shard, and the one that `verify` writes out."""

import pytest
import torch
from torch import Tensor

from automodel_rl.quantized.stochastic_rounding import hashed_rows, random_bits, round_to_bfloat16
from automodel_rl.tools.verify.one_process import rounded

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
CPU = torch.device("cpu")


def bits_of(shape: tuple[int, ...], step: int = 1, name: str = "0.mlp.up_proj.weight") -> Tensor:
    box = tuple(slice(0, size) for size in shape)
    rows = hashed_rows(shape, box, step, name, CPU)
    return random_bits(rows, torch.arange(shape[-1], dtype=torch.int32)).view(shape)


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape, dtype=torch.float64) * 10.0 ** torch.randint(-6, 3, shape)).to(dtype)


@DTYPES
def test_a_value_becomes_one_of_its_two_neighbours(dtype: torch.dtype) -> None:
    given = values(dtype, 64, 300)
    found = round_to_bfloat16(given, bits_of((64, 300))).to(torch.float64)
    nearest = given.to(torch.bfloat16).to(torch.float64)
    distance = (given.double() - nearest).abs()
    assert bool(((found - given.double()).abs() <= nearest.abs() * 2**-7 - distance).all())
    assert 0.4 < (found == nearest).float().mean().item() < 0.9


@DTYPES
def test_values_of_bfloat16_and_what_is_not_finite_stay(dtype: torch.dtype) -> None:
    given = torch.cat([values(dtype, 1000).to(torch.bfloat16).to(dtype), torch.zeros(2, dtype=dtype)])
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=dtype)
    bits = torch.full((1005,), 2**16 - 1, dtype=torch.int32)
    found = round_to_bfloat16(torch.cat([given, odd]), bits)
    assert torch.equal(found[:-3].to(dtype), given)
    assert torch.equal(found[-3:-1].to(dtype), odd[:2])
    assert bool(found[-1].isnan())


@DTYPES
def test_values_are_right_on_average(dtype: torch.dtype) -> None:
    """Over steps, and over places, each in units of the distance of two values of bfloat16."""
    given = 1 + torch.linspace(0, 2**-7, 17, dtype=dtype)[:-1]
    rows = given[:, None].expand(16, 512)
    found = torch.stack([round_to_bfloat16(rows, bits_of((16, 512), step)).to(dtype) for step in range(100)])
    error = (found - rows) * 2**7
    assert error.mean(dim=(0, 2)).abs().max() < 0.01
    assert error.mean(dim=0).abs().max() < 0.25  # 100 steps: 0.05 on average
    assert error.mean(dim=(1, 2)).abs().max() < 0.03


def test_random_bits_cover_all_numbers_alike_and_hang_together_nowhere() -> None:
    bits = bits_of((2048, 1024)).double() / 2**16
    counts = (bits * 64).long().flatten().bincount(minlength=64).double()
    expected = bits.numel() / 64
    assert ((counts - expected).square() / expected).sum().item() < 110  # chi-square of 63: 99.9% are below 104
    others = [bits_of((2048, 1024), step=2), bits_of((2048, 1024), name="1.mlp.up_proj.weight")]
    pairs = [bits.roll(1, 0), bits.roll(1, 1), bits.roll(7, 1), *(other.double() / 2**16 for other in others)]
    for other in pairs:
        assert torch.corrcoef(torch.stack([bits.flatten(), other.flatten()]))[0, 1].abs().item() < 0.004


@pytest.mark.parametrize(
    "box", [(slice(3, 7), slice(0, 5), slice(0, 200)), (slice(0, 9), slice(2, 5), slice(120, 200))], ids=str
)
def test_a_shard_has_the_numbers_of_its_places(box: tuple[slice, ...]) -> None:
    shape = (9, 5, 200)
    columns = torch.arange(box[-1].start, box[-1].stop, dtype=torch.int32)
    found = random_bits(hashed_rows(shape, box, 3, "0.mlp.experts.down_proj", CPU), columns)
    whole = bits_of(shape, 3, "0.mlp.experts.down_proj")
    assert torch.equal(found, whole[box].flatten(0, 1))


@pytest.mark.parametrize("shape", [(7,), (5, 130), (3, 4, 65)], ids=str)
@pytest.mark.parametrize("name", ["model.layers.11.mlp.up_proj.weight", "lm_head.weight"])
def test_verify_writes_the_same_out(shape: tuple[int, ...], name: str) -> None:
    given = values(torch.float64, *shape)
    bits = bits_of(shape, 4, "" if name == "lm_head.weight" else name)
    assert torch.equal(round_to_bfloat16(given, bits).double(), rounded(given, 4, name))


def test_a_compiler_makes_the_same_numbers() -> None:
    """Wide products of int32 wrap around there, too."""

    def both(given: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return round_to_bfloat16(given, random_bits(rows, columns))

    given = values(torch.float32, 40, 300)
    rows = hashed_rows((40, 300), (slice(0, 40), slice(0, 300)), 1, "", CPU)
    columns = torch.arange(300, dtype=torch.int32)
    assert torch.equal(torch.compile(both, dynamic=False)(given, rows, columns), both(given, rows, columns))
