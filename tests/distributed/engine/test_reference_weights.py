"""The reference policy's weights: the same log-probabilities wherever they and the model wait, and nothing is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig, MemoryConfig, OffloadConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

CASES: list[tuple[str, dict[str, Any], LoraConfig | None]] = [
    ("qwen3", {"pp": 2}, None),
    ("deepseek_v3", {"dp_shard": 2}, None),  # its routers have buffers that training changes
    ("qwen3", {"tp": 2}, None),
    ("qwen3", {}, LoraConfig(rank=2)),  # frozen weights wait on the host, too, but have no copy
]


class PlantedError(Exception):
    """What no code of the package catches."""


def weights_of(engine: Engine) -> list[Tensor]:
    tensors = (t for part in engine.handle.parts for t in (*part.parameters(), *part.buffers()))
    return [local_tensor(tensor.detach()).clone() for tensor in tensors]


def compare(folder: Path, sizes: dict, lora: LoraConfig | None, memory: MemoryConfig) -> None:
    """Training steps, each followed by the reference's log-probabilities, which stay those of the first weights."""
    model = ModelConfig(path=str(folder), dtype="float64", lora=lora)
    engine = Engine(
        ModelHandle.from_pretrained(model, ParallelConfig(**sizes), memory),
        OptimizerConfig(lr=1e-2, decay="constant"),
    )
    rank = engine.handle.layout.data_rank
    microbatches = [pack_microbatch(make_sequences(1 + rank, 10 * rank + m)) for m in range(2)]
    first = engine.logprobs(microbatches)
    reference = ReferenceWeights(engine.handle)
    assert reference.is_on_device == (memory.reference == "device")
    for step in range(3):
        engine.train_step(microbatches, sft_loss)
        own = weights_of(engine)
        if memory.offload is not None and step != 1:
            engine.handle.to_host()
        entered = reference.in_place()
        entered.__enter__()
        for found, expected in zip(engine.logprobs(microbatches), first, strict=True):
            assert torch.equal(found, expected)
        assert not entered.__exit__(PlantedError, PlantedError(), None)  # a failure in between loses nothing
        assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), own, strict=True))
        assert not torch.equal(engine.logprobs(microbatches)[0], first[0])


@pytest.mark.parametrize(("family", "sizes", "lora"), CASES, ids=str)
def test_the_reference_stays_and_the_policy_comes_back(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, lora: LoraConfig | None
) -> None:
    save_tiny_model(tmp_path, family)
    pool = ranks(ParallelConfig(**sizes).world_size)
    for place in ("host", "device"):
        for offload in (None, OffloadConfig()):
            pool.run(compare, tmp_path, sizes, lora, MemoryConfig(reference=place, offload=offload))
