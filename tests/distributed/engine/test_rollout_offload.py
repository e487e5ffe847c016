"""The trainer's memory goes to the host during rollouts and comes back bit for bit, on any layout."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import pack_microbatch
from automodel_rl.checkpoint.load import load_checkpoint
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig, OffloadConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.rollout_offload import RolloutOffload
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.offload import _as_bytes
from automodel_rl.parallel.sharding import local_tensor
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}),
    ("qwen3", {"dp_shard": 2}),
    ("qwen3", {"tp": 2, "sequence_parallel": True}),
    ("deepseek_v3", {"cp": 2, "ep": 2}),
]


def make_engine(folder: Path, sizes: dict, offload: OffloadConfig | None) -> Engine:
    model = ModelConfig(path=str(folder), dtype="float64")
    handle = ModelHandle.from_pretrained(model, ParallelConfig(**sizes), MemoryConfig(offload=offload))
    return Engine(handle, OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant"))


def state_of(engine: Engine) -> Iterator[Tensor]:
    """All that training changes: weights, buffers, moments."""
    with engine.moments_on_device():
        parts = engine.handle.parts
        tensors = (*(t for part in parts for t in (*part.parameters(), *part.buffers())), *engine.optimizer.moments())
        yield from (local_tensor(tensor.detach()).clone() for tensor in tensors)


def bytes_of_weights(engine: Engine) -> int:
    weights = (local_tensor(p.detach()) for part in engine.handle.parts for p in part.parameters())
    return sum(weight.untyped_storage().nbytes() for weight in weights)


def train(folder: Path, sizes: dict, offload: OffloadConfig | None) -> tuple[list[float], list[Tensor]]:
    """Losses, gradient norms and log-probabilities of steps, and the state after them. With `offload` everything waits
    on the host after each step, and again after log-probabilities."""
    engine = make_engine(folder, sizes, offload)
    rollouts, numbers = RolloutOffload(engine), []
    rank = engine.handle.layout.data_rank
    for step in range(3):
        microbatches = [pack_microbatch(make_sequences(1 + rank, 10 * rank + 3 * step + m)) for m in range(2)]
        for _ in range(2):
            rollouts.before_sync()
            rollouts.after_sync()
            assert bool(bytes_of_weights(engine)) == (offload is None or "weights" not in offload.what)
            rollouts.restore()
            logprobs = engine.logprobs(microbatches)
        output = engine.train_step(microbatches, sft_loss)
        numbers += [output.loss, output.grad_norm, float(torch.cat(logprobs).sum())]
    return numbers, [*state_of(engine)]


@pytest.mark.parametrize(("family", "sizes"), LAYOUTS, ids=str)
def test_offloading_changes_no_number(ranks: RankPool, tmp_path: Path, family: str, sizes: dict) -> None:
    save_tiny_model(tmp_path, family)
    pool = ranks(ParallelConfig(**sizes).world_size)
    plain, *offloaded = (
        pool.run(train, tmp_path, sizes, offload)
        for offload in (None, OffloadConfig(), OffloadConfig(what=("moments",)))
    )
    for found in offloaded:
        for (numbers, state), (expected, expected_state) in zip(found, plain, strict=True):
            assert numbers == expected
            assert all(torch.equal(a, b) for a, b in zip(state, expected_state, strict=True))


class PlantedError(Exception):
    """What no code of the package catches."""


def use_at_the_wrong_time(folder: Path, checkpoint: Path) -> None:
    """Whatever reads weights says that they are on the host, and all goes on when they are back."""
    engine, steady = (make_engine(folder, {}, offload) for offload in (OffloadConfig(), None))
    microbatches = [pack_microbatch(make_sequences(2, seed=0))]
    saver = CheckpointSaver(engine, {"config.yaml": ""}, in_background=True)
    rollouts = RolloutOffload(engine)
    for one in (engine, steady):
        one.train_step(microbatches, sft_loss)
    saver.save(checkpoint, {"step": 1}, {})  # still copies when the weights leave
    rollouts.before_sync()
    rollouts.after_sync()
    for use in (
        lambda: engine.logprobs(microbatches),
        lambda: engine.train_step(microbatches, sft_loss),
        lambda: list(engine.handle.named_hf_tensors()),
        lambda: engine.handle.save_pretrained(folder / "never"),
        lambda: saver.save(checkpoint, {"step": 2}, {}),
    ):
        with pytest.raises(RuntimeError, match="weights are on the host"):
            use()
    assert saver.wait() is None
    calls = itertools.count()

    def as_bytes(storage: torch.UntypedStorage) -> Tensor:
        if next(calls) == 3:
            raise PlantedError
        return _as_bytes(storage)

    with mock.patch("automodel_rl.model.offload._as_bytes", as_bytes), pytest.raises(PlantedError):
        rollouts.restore()
    assert not bytes_of_weights(engine)
    rollouts.restore()  # there is memory now; moments are still on the host
    saver.save(checkpoint.with_name("later"), {"step": 1}, {})
    assert saver.wait() is None
    expected = [*state_of(steady)]
    assert all(torch.equal(a, b) for a, b in zip(state_of(engine), expected, strict=True))
    for name in (checkpoint.name, "later"):
        other = make_engine(folder, {}, None)
        load_checkpoint(other, checkpoint.with_name(name))
        assert all(torch.equal(a, b) for a, b in zip(state_of(other), expected, strict=True))
    assert engine.train_step(microbatches, sft_loss) == steady.train_step(microbatches, sft_loss)


def test_weights_on_the_host_are_used_by_nothing_and_lost_by_no_failure(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1)
    ranks(1).run(use_at_the_wrong_time, tmp_path / "model", tmp_path / "step_1")
