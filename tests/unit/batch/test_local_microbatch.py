"""Microbatches cut over context-parallel ranks: every token is somewhere once, and sees exactly what it saw before."""

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import (
    Image,
    LocalMicrobatch,
    Microbatch,
    TokenSequence,
    empty_microbatch,
    local_microbatch,
    pack_microbatch,
)
from tests.tiny import make_sequences


@pytest.fixture
def microbatch() -> Microbatch:
    return pack_microbatch(make_sequences(5, seed=3))


def shares(microbatch: Microbatch, cp: int, multiple: int) -> list[LocalMicrobatch]:
    return [local_microbatch(microbatch, cp, rank, multiple) for rank in range(cp)]


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_gathered_and_restored_it_is_the_microbatch(microbatch: Microbatch, cp: int, multiple: int) -> None:
    locals_ = shares(microbatch, cp, multiple)
    assert len({local.num_tokens for local in locals_}) == 1
    assert locals_[0].num_tokens % multiple == 0
    restore = torch.arange(microbatch.num_tokens) if locals_[0].restore is None else locals_[0].restore
    for name in ("input_ids", "position_ids", "targets"):
        gathered = torch.cat([getattr(local, name) for local in locals_])
        assert torch.equal(gathered[restore], getattr(microbatch, name))
    is_real = torch.cat([local.is_real for local in locals_])
    assert is_real.sum() == microbatch.num_tokens
    assert is_real[restore].all()
    assert (torch.cat([local.targets for local in locals_])[~is_real] < 0).all()


def visible(locals_: list[LocalMicrobatch], microbatch: Microbatch, window: int = 1000) -> Tensor:
    """Which tokens of the microbatch see which, by the calls of all ranks, bool [T, T]; with a window in images."""
    total = sum(local.num_tokens for local in locals_)
    sees = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for local in locals_:
        for call in local.calls:
            queries = torch.arange(local.num_tokens) if call.queries is None else call.queries
            keys = torch.arange(total) if call.keys is None else call.keys
            for q, k in zip(queries.split(call.query_lengths), keys.split(call.key_lengths), strict=True):
                causal = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
                sees[(start + q)[:, None], k[None]] |= causal
        if (call := local.image_call) is not None:
            assert call.queries is not None
            assert call.keys is not None
            counts = torch.zeros(len(call.queries), dtype=torch.bool)
            counts[slice(None) if call.counted is None else call.counted] = True
            segments = zip(
                *(tensor.split(call.query_lengths) for tensor in (call.queries, counts)),
                call.keys.split(call.key_lengths),
                strict=True,
            )
            for q, counted, k in segments:
                places = torch.arange(len(k))
                within = places[None] > places[len(k) - len(q) :, None] - window
                sees[start + q[counted]] = False
                sees[(start + q[counted])[:, None], k[None]] = within[counted]
        start += local.num_tokens
    restore = torch.arange(microbatch.num_tokens) if locals_[0].restore is None else locals_[0].restore
    return sees[restore][:, restore]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_each_token_sees_its_own_sequence_up_to_itself(microbatch: Microbatch, cp: int) -> None:
    sequence = torch.repeat_interleave(torch.arange(len(microbatch.lengths)), torch.tensor(microbatch.lengths))
    expected = (sequence[:, None] == sequence[None]) & (
        microbatch.position_ids[:, None] >= microbatch.position_ids[None]
    )
    assert torch.equal(visible(shares(microbatch, cp, 1), microbatch), expected)


@pytest.mark.parametrize("window", [3, 1000])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_tokens_of_an_image_also_see_the_rest_of_it(cp: int, window: int) -> None:
    """Wherever ranks cut it, and the window reaches back from each token's own place."""
    spans = [[(1, 7), (9, 12)], [], [(0, 9)], [(20, 5)]]
    sequences = [
        TokenSequence(
            torch.zeros(26, dtype=torch.int64),
            torch.ones(26, dtype=torch.bool),
            media=tuple(Image(a, n, (1, 1, n), torch.zeros(0), bidirectional="everywhere") for a, n in of_sequence),
        )
        for of_sequence in spans
    ]
    microbatch = pack_microbatch(sequences)
    found = visible(shares(microbatch, cp, 2), microbatch, window)
    place = torch.arange(microbatch.num_tokens)
    image = torch.full_like(place, -1)
    for number, of_image in enumerate(microbatch.media):
        image[of_image.start : of_image.start + of_image.num_tokens] = number
    same = (image[:, None] == image[None]) & (image >= 0)[:, None]
    expected = (place[:, None] // 26 == place[None] // 26) & ((place[:, None] >= place[None]) | same)
    within = place[None] > place[:, None] - window
    assert torch.equal(found, expected & (within | (image < 0)[:, None]))


@pytest.mark.parametrize("cp", [2, 4])
def test_every_rank_reads_equally_many_keys(microbatch: Microbatch, cp: int) -> None:
    assert len({sum(sum(call.key_lengths) for call in local.calls) for local in shares(microbatch, cp, 1)}) == 1


def test_nothing_of_an_empty_row_is_real() -> None:
    assert not any(local.is_real.any() for local in shares(empty_microbatch(), 2, 1))
