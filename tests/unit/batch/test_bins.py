"""Bins hold every sequence once, within capacity, in the number asked for, and are dealt evenly."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_rl.batch import DataShare, TokenSequence, assign_bins, pack, share_bins
from automodel_rl.errors import InputError


@pytest.mark.parametrize(("min_count", "multiple", "expected"), [(1, 1, 2), (6, 1, 6), (1, 4, 4), (5, 4, 8)])
def test_number_of_bins_of_8_sequences_of_200_tokens(min_count: int, multiple: int, expected: int) -> None:
    bins = assign_bins([200] * 8, 1024, min_count=min_count, multiple=multiple)
    assert len(bins) == expected
    assert all(bins)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_every_sequence_is_in_one_bin_within_capacity(lengths: list[int], minimum: int, multiple: int) -> None:
    bins = assign_bins(lengths, 100, min_count=minimum, multiple=multiple)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 100 for b in bins)
    assert len(bins) >= minimum
    assert len(bins) % multiple == 0
    if len(lengths) >= len(bins):
        assert all(bins)


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(1, 99), max_size=5), min_size=1, max_size=12))
def test_best_fit_decreasing_is_near_the_optimum(cuts: list[set[int]]) -> None:
    """Full bins, each cut into pieces: their number is the optimum."""
    edges = [[0, *sorted(of_bin), 100] for of_bin in cuts]
    lengths = [b - a for of_bin in edges for a, b in itertools.pairwise(of_bin)]
    assert len(assign_bins(lengths, 100)) <= 11 / 9 * len(cuts) + 6 / 9


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # First come, first served takes a third bin.
        ([4, 6, 4, 6], 2),
        # So does putting the 2 into the emptiest bin that it fits.
        ([8, 5, 2, 5], 2),
    ],
)
def test_the_fullest_bin_with_room_is_filled_first_longest_sequences_first(lengths: list[int], expected: int) -> None:
    assert len(assign_bins(lengths, 10)) == expected


def test_a_pipeline_gets_a_row_for_every_stage() -> None:
    microbatches = pack(sequences(4, 4, 4, 4, 4, 4), 64, min_microbatches=4)
    assert [microbatch.is_empty for microbatch in microbatches] == [False] * 4
    assert sorted(i for microbatch in microbatches for i in microbatch.order) == list(range(6))


def test_groups_stay_together_and_must_be_whole() -> None:
    microbatches = pack(sequences(5, 4, 3, 2, 6, 1), 9, sequences_per_example=2)
    assert sorted(microbatch.order for microbatch in microbatches) == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(ValueError, match="3 sequences do not form whole groups of 2"):
        pack(sequences(1, 1, 1), 9, sequences_per_example=2)


def test_what_is_longer_than_a_row_is_refused_by_its_place() -> None:
    with pytest.raises(InputError, match="sequence 1 has 11 tokens but a microbatch holds 10"):
        pack(sequences(3, 11), 10)
    with pytest.raises(
        InputError, match="sequences 4 to 5, which stay together, have 11 tokens but a microbatch holds 10"
    ):
        pack(sequences(1, 2, 3, 4, 5, 6), 10, sequences_per_example=2)


def test_shares_have_equal_numbers_and_even_work() -> None:
    costs = [9, 1, 1, 1, 5, 5, 1, 1.0]
    shares = share_bins(costs, 2)
    assert [len(share) for share in shares] == [4, 4]
    assert sorted(place for share in shares for place in share) == list(range(8))
    assert {sum(costs[i] for i in share) for share in shares} == {12.0}


def sequences(*lengths: int) -> list[TokenSequence]:
    return [TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in lengths]


def test_fewer_sequences_than_data_ranks_give_empty_rows() -> None:
    microbatches = [pack(sequences(5), 16, share=DataShare(rank, 3)) for rank in range(3)]
    assert [len(of_rank) for of_rank in microbatches] == [1, 1, 1]
    assert sorted(microbatch.is_empty for of_rank in microbatches for microbatch in of_rank) == [False, True, True]


def test_data_ranks_are_balanced_by_work_and_not_by_tokens() -> None:
    lengths = [64, *[8] * 8]  # the same number of tokens, but attention makes the long one dearer
    long, short = (pack(sequences(*lengths, *lengths), 64, share=DataShare(r, 2), cost=lambda n: n * n) for r in (0, 1))
    assert sum(n * n for microbatch in long for n in microbatch.lengths) == sum(
        n * n for microbatch in short for n in microbatch.lengths
    )
    assert sorted(i for microbatches in (long, short) for microbatch in microbatches for i in microbatch.order) == list(
        range(18)
    )
