"""Receive buffers of a pipeline exist for the microbatches in flight, however many a step has."""

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from automodel_rl.batch import pack_microbatch
from automodel_rl.compat.pipelining import PackedStage
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model


def most_buffers(folder: Path, parallel: ParallelConfig, num_microbatches: int) -> tuple[int, int]:
    """The most receive buffers of this rank that lived at a time in a step, and how many were made."""
    engine = Engine(
        ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), parallel),
        OptimizerConfig(decay="constant"),
    )
    alive: dict[int, weakref.ref] = {}
    most = made = 0
    regroup = PackedStage._regroup

    def watched(*arguments: Any) -> Any:
        nonlocal most, made
        ops = regroup(*arguments)
        for op in ops:
            if op.op is dist.irecv:
                made += 1
                alive[made] = weakref.ref(op.tensor)
        most = max(most, sum(reference() is not None for reference in alive.values()))
        return ops

    microbatches = [pack_microbatch(make_sequences(1 + number % 3, number)) for number in range(num_microbatches)]
    with mock.patch.object(PackedStage, "_regroup", watched):
        engine.train_step(microbatches, sft_loss)
        training = most
        engine.logprobs(microbatches)
    assert sum(reference() is not None for reference in alive.values()) == 0
    return training, made


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"schedule": "Interleaved1F1B", "virtual_stages": 2},
        {"schedule": "InterleavedZeroBubble", "virtual_stages": 2},
        {"schedule": "ZBVZeroBubble", "virtual_stages": 2},
    ],
    ids=lambda sizes: sizes.get("schedule", "1F1B"),
)
def test_more_microbatches_need_no_more_buffers(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    if "ZeroBubble" in sizes.get("schedule", "") and TORCH < (2, 13):
        pytest.skip("schedules that split the backward need torch 2.13")
    save_tiny_model(tmp_path)
    parallel = ParallelConfig(pp=2, **sizes)
    few, many = (ranks(2).run(most_buffers, tmp_path, parallel, count) for count in (8, 24))
    for (most_of_few, made_of_few), (most_of_many, made_of_many) in zip(few, many, strict=True):
        assert made_of_many == 3 * made_of_few
        assert most_of_many == most_of_few < 10
