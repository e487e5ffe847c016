"""Microbatches cut over context-parallel ranks: every token is somewhere once, and sees exactly what it saw before."""

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, Microbatch, empty_microbatch, local_microbatch, pack_microbatch
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


def visible(locals_: list[LocalMicrobatch], microbatch: Microbatch) -> Tensor:
    """Which tokens of the microbatch see which, by the calls of all ranks, bool [T, T]."""
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


@pytest.mark.parametrize("cp", [2, 4])
def test_every_rank_reads_equally_many_keys(microbatch: Microbatch, cp: int) -> None:
    assert len({sum(sum(call.key_lengths) for call in local.calls) for local in shares(microbatch, cp, 1)}) == 1


def test_nothing_of_an_empty_row_is_real() -> None:
    assert not any(local.is_real.any() for local in shares(empty_microbatch(), 2, 1))
