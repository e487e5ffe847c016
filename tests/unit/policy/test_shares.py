"""Rows on their way to a rank are the rows that were sent."""

import pickle

import pytest
import torch

from automodel_rl.batch import Batch, Image, Microbatch, Routes, RoutesRef, TokenSequence
from automodel_rl.policy.shares import RowValues, Share


def rows(dtype: torch.dtype) -> list[TokenSequence]:
    found = []
    for row, n in enumerate((4, 7, 1)):
        image = Image(start=0, num_tokens=1, grid=(1, 1, 1), pixels=torch.full((3, 2, 2), float(row)))
        found.append(
            TokenSequence(
                torch.arange(n) + 10 * row,
                torch.arange(n) % 2 == 0,
                {"weights": torch.rand(n, requires_grad=True).to(dtype), "numbers": torch.arange(n)},
                Routes((1, 2), torch.full((n, 2, 3), row, dtype=torch.int16)),
                (image,),
            )
        )
    return found


def same(one: Microbatch, other: Microbatch) -> bool:
    tensors = [(one.input_ids, other.input_ids), (one.loss_mask, other.loss_mask), (one.cu_seqlens, other.cu_seqlens)]
    tensors += [(one.values[name], other.values[name]) for name in one.values]
    if one.routes is not None and other.routes is not None:
        tensors.append((one.routes.experts, other.routes.experts))
    pairs = zip(one.media, other.media, strict=True)
    return (
        (one.order, one.is_empty, [*one.values]) == (other.order, other.is_empty, [*other.values])
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)
        and (one.routes is None) == (other.routes is None)
        and all(a.start == b.start and torch.equal(a.load(), b.load()) for a, b in pairs)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_share_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    batch = Batch(rows(dtype))
    share = Share.of(batch, [[2, 0], [], [1]])
    arrived = pickle.loads(pickle.dumps(share))
    assert [microbatch.is_empty for microbatch in share.pack()] == [False, True, False]
    assert all(same(one, other) for one, other in zip(share.pack(), arrived.pack(), strict=True))


def test_a_share_without_rows_knows_the_names_of_the_batchs_values() -> None:
    arrived = pickle.loads(pickle.dumps(Share.of(Batch(rows(torch.bfloat16)), [[]])))
    (microbatch,) = arrived.pack()
    assert microbatch.is_empty
    assert {name: value.dtype for name, value in microbatch.values.items()} == {
        "weights": torch.bfloat16,
        "numbers": torch.int64,
    }


def test_routes_that_are_elsewhere_are_found_piece_by_piece() -> None:
    plain = [TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in (2, 3)]
    whole, first, second = RoutesRef(0, (1, 0), 0, 2), RoutesRef(1, (1, 5), 0, 1), RoutesRef(0, (1, 7), 1, 3)
    batch = Batch(plain, routes=[[whole], [first, second]])
    there = {
        at: Routes((4,), torch.full((at.stop - at.start, 1, 2), at.key[1], dtype=torch.int16))
        for at in (whole, first, second)
    }
    (microbatch,) = pickle.loads(pickle.dumps(Share.of(batch, [[1, 0]]))).pack(there)
    assert microbatch.routes.experts[:, 0, 0].tolist() == [5, 7, 7, 0, 0]


def test_results_of_no_rows_are_none() -> None:
    assert RowValues.of([], []).by_row() == {}
    assert RowValues.of([3, 1], [torch.ones(2, 2), torch.zeros(1, 2)]).by_row()[1].tolist() == [[0.0, 0.0]]
