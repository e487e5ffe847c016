"""What is left open of a step's memory is decided together: the fastest way that fits, and the largest microbatch."""

import pytest
from transformers import Qwen3Config

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.algorithms import GRPOConfig, SFTConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.fit import (
    MAX_BESIDE_A_GENERATOR,
    MAX_TOKENS,
    STEP,
    Fit,
    fit_to_device,
    largest_microbatch,
)
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
    assert largest_microbatch(model, parallel, MemoryConfig(), 1e15) == MAX_TOKENS
    recomputed = largest_microbatch(model, parallel, MemoryConfig(activation_checkpointing="full"), room)
    assert recomputed > 10 * STEP


def config_of(sizes: dict, tokens: int | str = "auto", memory: dict | None = None, **other: object) -> SFTConfig:
    values = {
        "model": {"path": "x"},
        "data": {"train": "x.jsonl"},
        "batch": {"sequences": 64, "microbatch_tokens": tokens},
        "length": {"steps": 1},
        "parallel": sizes,
        "memory": memory or {},
        "output": "out",
    }
    return SFTConfig.model_validate(values | other)


def fit(sizes: dict, gib: float, layers: int = 36, tokens: int | str = "auto", **memory: object) -> Fit:
    """What is decided for some layers of an 8B shape."""
    whole = Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=layers,
        intermediate_size=12_288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
    )
    return fit_to_device(config_of(sizes, tokens, memory), whole, gib * 2**30)


def chosen(found: Fit) -> tuple[str, str, object]:
    return found.parallel.fsdp, found.memory.activation_checkpointing, found.memory.offload_optimizer


@pytest.mark.parametrize(
    ("sizes", "gib", "layers", "expected"),
    [
        ({"dp_shard": 8}, 140, 36, ("keep", "none", False)),
        ({"dp_shard": 8}, 79, 36, ("reshard", "none", False)),
        ({"dp_shard": 8}, 40, 36, ("reshard", "full", False)),
        ({"dp_shard": 2}, 79, 2, ("keep", "none", False)),
        ({}, 79, 12, ("keep", "none", True)),
    ],
    ids=str,
)
def test_the_fastest_way_that_fits_is_taken(
    sizes: dict, gib: float, layers: int, expected: tuple[str, str, object]
) -> None:
    found = fit(sizes, gib, layers)
    assert found.fits
    assert chosen(found) == expected


def test_what_the_config_gives_stays() -> None:
    found = fit({"dp_shard": 8, "fsdp": "keep"}, 79, activation_checkpointing="full")
    assert chosen(found)[:2] == ("keep", "full")
    given = fit({"dp_shard": 8}, 79, tokens=4096, offload_optimizer=True)
    assert given.num_tokens == 4096
    assert given.memory.offload_optimizer is True
    assert given.fits


def test_a_model_that_fits_nowhere_is_said_not_to_fit() -> None:
    found = fit({}, 24)
    assert not found.fits
    assert chosen(found) == ("reshard", "full", True)


def test_beside_a_generator_that_keeps_its_memory_microbatches_are_bounded() -> None:
    def found(**generator: object) -> Fit:
        vllm = {"kind": "vllm", "memory_fraction": 0.4, **generator}
        config = GRPOConfig.model_validate(
            {
                "model": {"path": "x"},
                "data": {"train": "x.jsonl"},
                "length": {"steps": 1},
                "output": "out",
                "batch": {"microbatch_tokens": "auto"},
                "rollout": {"prompts": 8, "max_prompt_tokens": 64, "max_new_tokens": 64, "generator": vllm},
                "rewards": [{"function": "math"}],
            }
        )
        return fit_to_device(config, Qwen3Config(**DENSE, num_hidden_layers=4), 79 * 2**30)

    beside = found()
    assert beside.num_tokens == MAX_BESIDE_A_GENERATOR
    assert 0.4 * 79 * 2**30 < beside.beside < 0.41 * 79 * 2**30
    assert found(sleep=2).num_tokens == MAX_TOKENS
    assert found(place=[1]).num_tokens == MAX_TOKENS


def test_what_is_decided_holds_for_the_language_model_of_components() -> None:
    components = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}
    config = config_of({}, components=components)
    decided = Fit(ParallelConfig(dp_shard=2, fsdp="reshard"), MemoryConfig(), 4096, 1024, 1.0, 1).of(config)
    assert decided.components is not None
    assert decided.components.language.parallel == decided.parallel
