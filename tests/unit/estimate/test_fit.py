"""The largest capacity of microbatches that memory allows, for one rank and for pipelines."""

import pytest
from transformers import Qwen3Config

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.fit import MOST_TOKENS, STEP, largest_microbatch
from automodel_rl.estimate.memory import MemoryModel
from tests.tiny_families import DENSE

LAYOUTS = [{}, {"pp": 2}, {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}, {"cp": 2}]


def peak(model: MemoryModel, parallel: ParallelConfig, num_tokens: int) -> int:
    count = 2 * parallel.pp
    return model.with_microbatches_of(num_tokens).plan(parallel, MemoryConfig(), count).peak


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_one_step_more_does_not_fit(sizes: dict) -> None:
    parallel = ParallelConfig(**sizes)
    config = Qwen3Config(**DENSE, num_hidden_layers=4)
    model = MemoryModel(config, ModelConfig(path="x"), STEP, OptimizerConfig())
    room = peak(model, parallel, 10 * STEP) + 1
    assert largest_microbatch(model, parallel, MemoryConfig(), room) == 10 * STEP
    assert largest_microbatch(model, parallel, MemoryConfig(), 0) == 0
    assert largest_microbatch(model, parallel, MemoryConfig(), 1e15) == MOST_TOKENS
    recomputed = largest_microbatch(model, parallel, MemoryConfig(activation_checkpointing="full"), room)
    assert recomputed > 10 * STEP
