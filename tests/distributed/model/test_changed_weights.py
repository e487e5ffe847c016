"""Weights that are changed for a while: all that are trained, equally in all copies, and undone to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.perturbed_weights import perturbed_weights
from automodel_rl.parallel.sharding import local_tensor
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

Tensors = dict[str, Tensor]


def change(folder: Path, parallel: ParallelConfig, dtype: str, lora: LoraConfig | None) -> dict[str, Any]:
    """This rank's shards before, in and after the block, whole tensors before and in it, and what is trained."""
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype, "lora": lora})
    handle = ModelHandle.from_pretrained(model, parallel)
    parameters = dict(handle.named_parameters())

    def shards() -> Tensors:
        return {name: local_tensor(parameter).detach().clone() for name, parameter in parameters.items()}

    def whole() -> Tensors:
        return {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}

    found: dict[str, Any] = {"before": shards(), "whole before": whole()}
    with perturbed_weights(handle):
        found |= {"inside": shards(), "whole inside": whole()}
    return found | {"after": shards(), "trained": {n for n, p in parameters.items() if p.requires_grad}}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pp": 2},
        {"dp_shard": 2},
        {"dp_shard": 2, "dp_replicate": 2},
        {"cp": 2},
        {"tp": 2},
        {"dp_shard": 2, "ep": 2},
    ],
    ids=str,
)
def test_every_trained_weight_changes_and_comes_back(ranks: RankPool, tmp_path: Path, sizes: dict, dtype: str) -> None:
    save_tiny_model(tmp_path, "qwen3_moe" if "ep" in sizes else "qwen2")
    parallel = ParallelConfig(**sizes)
    results = ranks(parallel.world_size).run(change, tmp_path, parallel, "bfloat16", None)
    for found in results:
        assert found["trained"] == found["before"].keys()
        for name, before in found["before"].items():
            assert torch.equal(found["after"][name], before)
            if before.numel():
                assert not torch.equal(found["inside"][name], before), name
        for name, before in found["whole before"].items():
            error = (found["whole inside"][name].double() - before.double()).norm() / before.double().norm()
            assert 0.05 < error < 0.5 or before.norm() == 0, (name, error)
    inside = [found["whole inside"] for found in results]
    assert all(
        torch.equal(other[name], inside[0][name]) for other in inside for name in other.keys() & inside[0].keys()
    )


def test_new_adapters_change_too_and_frozen_weights_stay(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    (found,) = ranks(1).run(change, tmp_path, ParallelConfig(), "float32", LoraConfig(rank=4))
    zeros = [name for name in found["trained"] if not found["before"][name].any()]
    assert zeros
    assert all(found["inside"][name].any() for name in zeros)
    for name, before in found["before"].items():
        assert torch.equal(found["after"][name], before)
        assert torch.equal(found["inside"][name], before) == (name not in found["trained"])
