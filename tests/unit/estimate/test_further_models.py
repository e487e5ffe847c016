"""Memory of models beside the trained one, in the phases of a step."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_rl.config.further_models import FurtherModel
from automodel_rl.config.model import MemoryConfig, ModelConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig
from automodel_rl.estimate.further_models import FurtherModelsMemory
from automodel_rl.estimate.memory import MemoryModel

SIZES = {"vocab_size": 32_000, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
SMALL = AutoConfig.for_model("qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, **SIZES)
LARGE = AutoConfig.for_model("qwen3", hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, **SIZES)
TOKENS = 4096
ALONE, MEMORY = ParallelConfig(), MemoryConfig()
OWN = MemoryModel(SMALL, ModelConfig(path="small"), TOKENS, OptimizerConfig()).plan(ALONE, MEMORY, 2)


def beside(whole: Any, **asked: Any) -> tuple[int, int]:
    models = FurtherModelsMemory({"one": FurtherModel(ModelConfig(path="x"), "one", **asked)}, {"one": whole})
    (rank,) = OWN.ranks
    return models.resident_bytes(ALONE, MEMORY), models.peak_bytes(ALONE, MEMORY, TOKENS, rank)


def test_without_any_there_is_nothing() -> None:
    assert (
        FurtherModelsMemory().resident_bytes(ALONE, MEMORY)
        == FurtherModelsMemory().peak_bytes(ALONE, MEMORY, TOKENS, OWN.ranks[0])
        == 0
    )


def test_a_teacher_that_waits_on_the_host_computes_beside_the_students_weights_and_moments() -> None:
    on_device, on_host = beside(LARGE), beside(LARGE, between="host")
    assert on_host[0] == 0
    assert on_host[1] == on_device[1] + on_device[0]
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(LARGE).num_parameters()
    assert on_device[0] == pytest.approx(2 * count, rel=0.02)


def test_a_critic_has_the_device_in_turns_or_together() -> None:
    apart, together = beside(LARGE, is_trained=True, between="host"), beside(LARGE, is_trained=True)
    (rank,) = OWN.ranks
    step = MemoryModel(LARGE, ModelConfig(path="x"), TOKENS, OptimizerConfig()).plan(ALONE, MEMORY, 2).peak
    assert apart == (0, step)
    assert sum(together) == step + rank.weights + rank.moments
