"""Microbatches: what is packed comes back, aligned as it went in."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_rl.batch import (
    IGNORED_TARGET,
    DataShare,
    TokenSequence,
    empty_microbatch,
    in_packed_order,
    pack,
    pack_microbatch,
    unpack,
)


def sequence(*ids: int, mask: str | None = None) -> TokenSequence:
    tokens = torch.tensor(ids)
    loss_mask = torch.tensor([c == "1" for c in mask]) if mask else torch.ones(len(ids), dtype=torch.bool)
    return TokenSequence(tokens, loss_mask, {"advantages": tokens.float() / 10})


def test_every_tensor_is_aligned_with_the_position_that_predicts() -> None:
    microbatch = pack_microbatch([sequence(5, 6, 7, mask="011"), sequence(8, 9, mask="10")])
    assert microbatch.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert microbatch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert microbatch.targets.tolist() == [6, 7, IGNORED_TARGET, 9, IGNORED_TARGET]
    assert microbatch.loss_mask.tolist() == [True, True, False, False, False]
    assert microbatch.values["advantages"].tolist() == pytest.approx([0.6, 0.7, 0, 0.9, 0])
    assert microbatch.cu_seqlens.tolist() == [0, 3, 5]
    assert microbatch.cu_seqlens.dtype == torch.int32


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_unpack_gives_back_what_pack_shifted(lengths: list[int]) -> None:
    sequences = [sequence(*range(10 * i + 1, 10 * i + 1 + n)) for i, n in enumerate(lengths)]
    microbatch = pack_microbatch(sequences)
    for piece, original in zip(unpack(microbatch.values["advantages"], microbatch), sequences, strict=True):
        assert piece[0] == 0
        assert torch.equal(piece[1:], original.values["advantages"][1:])


def test_an_empty_row_counts_for_nothing_and_has_the_same_values() -> None:
    like = pack_microbatch([sequence(1, 2, 3)])
    microbatch = empty_microbatch(like)
    assert microbatch.num_sequences == 0
    assert not microbatch.loss_mask.any()
    assert microbatch.values.keys() == like.values.keys()
    assert unpack(microbatch.values["advantages"], microbatch) == []


def test_a_value_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry for each token"):
        TokenSequence(torch.arange(3), torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([5, 6], torch.ones(2, dtype=torch.bool), "input_ids is a list: it must be a tensor [n] of torch.int64"),
        (torch.ones(2), torch.ones(2, dtype=torch.bool), "input_ids is of torch.float32 with shape (2,)"),
        (torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.bool), "with shape (1, 2): it must be"),
        (torch.arange(2), torch.ones(2), "loss_mask is of torch.float32 with shape (2,): it must be a tensor [n] of"),
        (torch.arange(2), torch.ones(2, dtype=torch.int64), "loss_mask is of torch.int64"),
        (torch.arange(2), [True, False], "loss_mask is a list"),
    ],
)
def test_what_is_no_tensor_of_ids_or_no_mask_is_refused_in_one_line(ids: object, mask: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenSequence(ids, mask)


def test_a_value_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="advantages is a list: expected a torch tensor"):
        TokenSequence(torch.arange(2), torch.ones(2, dtype=torch.bool), {"advantages": [1.0, 2.0]})


@pytest.mark.parametrize("first_has_values", [True, False])
@pytest.mark.parametrize("capacity", [8, 4], ids=["one microbatch", "two microbatches"])
def test_values_that_only_some_sequences_have_are_refused(first_has_values: bool, capacity: int) -> None:
    bare = TokenSequence(torch.arange(3), torch.ones(3, dtype=torch.bool))
    both = [sequence(1, 2, 3), bare] if first_has_values else [bare, sequence(1, 2, 3)]
    with pytest.raises(ValueError, match="sequence 1 has values .* but sequence 0 has .*: sequences that are packed"):
        pack(both, capacity)
    with pytest.raises(ValueError, match="sequence 1 has values"):
        pack_microbatch(both)


def test_a_sequence_without_tokens_is_refused() -> None:
    nothing = TokenSequence(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    with pytest.raises(ValueError, match="sequence 1 has no tokens: remove it"):
        pack([TokenSequence(torch.arange(2), torch.ones(2, dtype=torch.bool)), nothing], 8)


def test_results_come_back_in_the_order_in_which_sequences_were_packed() -> None:
    sequences = [sequence(*range(n)) for n in (2, 7, 3, 5, 1)]
    microbatches = pack(sequences, 8, min_microbatches=4)
    by_cp = [length for microbatch in microbatches for length in microbatch.lengths if not microbatch.is_empty]
    assert by_cp != [2, 7, 3, 5, 1]
    assert in_packed_order(by_cp, microbatches) == [2, 7, 3, 5, 1]
    of_second_rank = pack(sequences, 8, share=DataShare(1, 2))
    places = [place for microbatch in of_second_rank for place in microbatch.order]
    assert in_packed_order(places, of_second_rank) == sorted(places)
    with pytest.raises(ValueError, match="1 results for 5 sequences"):
        in_packed_order([0], microbatches)
