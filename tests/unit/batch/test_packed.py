"""Rows: what is packed comes back, aligned as it went in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_rl.batch import IGNORED_TARGET, TokenSequence, empty_row, pack_row, unpack


def sequence(*ids: int, mask: str | None = None) -> TokenSequence:
    tokens = torch.tensor(ids)
    loss_mask = torch.tensor([c == "1" for c in mask]) if mask else torch.ones(len(ids), dtype=torch.bool)
    return TokenSequence(tokens, loss_mask, {"advantages": tokens.float() / 10})


def test_every_tensor_is_aligned_with_the_position_that_predicts() -> None:
    row = pack_row([sequence(5, 6, 7, mask="011"), sequence(8, 9, mask="10")])
    assert row.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert row.targets.tolist() == [6, 7, IGNORED_TARGET, 9, IGNORED_TARGET]
    assert row.loss_mask.tolist() == [True, True, False, False, False]
    assert row.values["advantages"].tolist() == pytest.approx([0.6, 0.7, 0, 0.9, 0])
    assert row.cu_seqlens.tolist() == [0, 3, 5]
    assert row.cu_seqlens.dtype == torch.int32


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_unpack_gives_back_what_pack_shifted(lengths: list[int]) -> None:
    sequences = [sequence(*range(10 * i + 1, 10 * i + 1 + n)) for i, n in enumerate(lengths)]
    row = pack_row(sequences)
    for piece, original in zip(unpack(row.values["advantages"], row), sequences, strict=True):
        assert piece[0] == 0
        assert torch.equal(piece[1:], original.values["advantages"][1:])


def test_an_empty_row_counts_for_nothing_and_has_the_same_values() -> None:
    like = pack_row([sequence(1, 2, 3)])
    row = empty_row(like)
    assert row.num_sequences == 0
    assert not row.loss_mask.any()
    assert row.values.keys() == like.values.keys()
    assert unpack(row.values["advantages"], row) == []


def test_a_value_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry for each token"):
        TokenSequence(torch.arange(3), torch.ones(2, dtype=torch.bool))
