"""Noise as large as rounding moves log-probabilities as far as rounding does, and alike on ranks that share tensors."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_rl import Engine, ModelHandle, OptimizerConfig
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.model.rounding_noise import rounding_noise
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model, save_tiny_multimodal_model


def logprobs_of(folder: Path, dtype: str, parallel: ParallelConfig, noise: torch.dtype | None = None) -> Tensor:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype=dtype), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-3, decay="constant"))
    microbatches = [pack_microbatch(make_sequences(8, seed=0))]
    plain = torch.cat(engine.logprobs(microbatches)).double()
    if noise is None:
        return plain
    with rounding_noise(handle, noise):
        disturbed = torch.cat(engine.logprobs(microbatches)).double()
    assert torch.equal(torch.cat(engine.logprobs(microbatches)).double(), plain)
    return disturbed


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).square().mean().sqrt().item()


@pytest.mark.parametrize("num_layers", [4, 24])
def test_noise_moves_log_probabilities_as_far_as_rounding(ranks: RankPool, tmp_path: Path, num_layers: int) -> None:
    """Of models shallow and deep, which roundings carry through further."""
    save_tiny_model(tmp_path, "qwen3", num_layers=num_layers)
    run = ranks(1).run
    one = ParallelConfig()
    (exact,), (rounded,) = (run(logprobs_of, tmp_path, dtype, one) for dtype in ("float32", "bfloat16"))
    (disturbed,) = run(logprobs_of, tmp_path, "float32", one, torch.bfloat16)
    assert 0.3 < distance(disturbed, exact) / distance(rounded, exact) < 3


def test_ranks_that_share_a_tensor_disturb_it_alike(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    (alone,) = ranks(1).run(logprobs_of, tmp_path, "float64", ParallelConfig(), torch.bfloat16)
    for of_rank in ranks(2).run(logprobs_of, tmp_path, "float64", ParallelConfig(tp=2), torch.bfloat16):
        assert torch.allclose(of_rank, alone, rtol=1e-9)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=str)
def test_the_layers_of_a_language_model_beside_an_encoder_are_disturbed(
    ranks: RankPool, tmp_path: Path, sizes: dict
) -> None:
    save_tiny_multimodal_model(tmp_path, "llava", num_layers=2)
    parallel = ParallelConfig(**sizes)
    run = ranks(parallel.world_size).run
    plain, *_ = run(logprobs_of, tmp_path, "float32", parallel)
    disturbed, *_ = run(logprobs_of, tmp_path, "float32", parallel, torch.bfloat16)
    assert 0 < distance(disturbed, plain) < 0.1
