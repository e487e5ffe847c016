"""The indexers' own loss, against plain transformers, one sequence at a time."""

from pathlib import Path

import pytest
import torch

from automodel_rl import ModelHandle
from automodel_rl.batch import TokenSequence, pack_microbatch
from automodel_rl.config import IndexerConfig, MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.indexer_loss import CROSS_ENTROPY
from tests.indexer_reference import gradients_of_one_process
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

WEIGHT = 0.3
Found = tuple[float, float, dict[str, torch.Tensor]]


def sequences_of(rank: int) -> list[TokenSequence]:
    """Shorter and longer than the number of keys that a query sees, others on each rank."""
    short = [
        TokenSequence(sequence.input_ids[: 3 + rank], sequence.loss_mask[: 3 + rank])
        for sequence in make_sequences(1, 50 + rank)
    ]
    return [*make_sequences(3 + rank, rank), *short]


def train(
    folder: Path, parallel: ParallelConfig, memory: MemoryConfig, trained: bool = True, dtype: str = "float64"
) -> Found:
    """The metric and the gradient norm of a step, and whole gradients of the same batch, on rank 0 of a stage."""
    indexer = IndexerConfig(weight=WEIGHT) if trained else None
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype, "indexer": indexer})
    handle = ModelHandle.from_pretrained(model, parallel, memory)
    engine = Engine(handle, OptimizerConfig(), total_steps=1)
    sequences = sequences_of(handle.layout.data_rank)
    microbatches = [pack_microbatch(sequences[:2]), pack_microbatch(sequences[2:])]
    engine.forward_backward(microbatches, sft_loss)
    gradients = {name: gradient.clone() for name, gradient in handle.named_hf_gradients()}
    engine.zero_grad()
    output = engine.train_step(microbatches, sft_loss)
    return output.metrics.get(CROSS_ENTROPY, 0.0), output.grad_norm, gradients


@pytest.mark.parametrize(
    ("family", "sizes", "recomputed", "num_dense"),
    [
        ("deepseek_v32", {}, "full", 0),
        ("deepseek_v32", {"cp": 2, "tp": 2}, "none", 0),
        ("deepseek_v32", {"tp": 2, "sequence_parallel": True, "pp": 2}, "selective", 0),
        ("deepseek_v32", {"pp": 2}, "full", 2),  # a stage without a mixture
        ("glm_moe_dsa", {"dp_shard": 2, "ep": 2, "fsdp": "reshard"}, "full", 0),
        ("glm_moe_dsa", {"pp": 2, "cp": 2}, "none", 0),
    ],
    ids=str,
)
def test_layouts_equal_transformers(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, recomputed: str, num_dense: int
) -> None:
    save_tiny_model(tmp_path, family, **({"first_k_dense_replace": num_dense} if num_dense else {}))
    parallel = ParallelConfig(**sizes)
    memory = MemoryConfig.model_validate({"activation_checkpointing": recomputed})
    found = ranks(parallel.world_size).run(train, tmp_path, parallel, memory)
    everything = [s for rank in range(parallel.dp_shard) for s in sequences_of(rank)]
    entropy, expected = gradients_of_one_process(tmp_path, everything, WEIGHT)
    assert all(of_rank[0] == pytest.approx(entropy, rel=1e-6) for of_rank in found)
    gradients = {name: gradient for of_rank in found for name, gradient in of_rank[2].items()}
    for kind in (True, False):
        names = {name for name in expected if (".indexer." in name) == kind and ".experts." not in name}
        largest = max(float(expected[name].abs().max()) for name in names)
        for name in names:
            difference = float((gradients[name] - expected[name]).abs().max())
            assert difference < 2e-6 * largest, f"{name}: {difference} of {largest}"


def test_the_model_is_trained_as_with_frozen_indexers(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v32")
    layout, memory = ParallelConfig(), MemoryConfig()
    ((_, norm, gradients),) = ranks(1).run(train, tmp_path, layout, memory)
    ((_, plain_norm, plain),) = ranks(1).run(train, tmp_path, layout, memory, False)
    assert norm == pytest.approx(plain_norm, rel=1e-12)
    assert {name for name in gradients if name not in plain} == {name for name in gradients if ".indexer." in name}
    assert all(torch.equal(gradients[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("indexer", [True, False])
def test_selective_checkpointing_keeps_nothing_of_the_choice(ranks: RankPool, tmp_path: Path, indexer: bool) -> None:
    """In float32, where scores are no copy of products."""
    save_tiny_model(tmp_path, "deepseek_v32")
    found = [
        ranks(1).run(
            train, tmp_path, ParallelConfig(), MemoryConfig(activation_checkpointing=recomputed), indexer, "float32"
        )[0]
        for recomputed in ("none", "selective")
    ]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in found[0][2].values())
    for name, gradient in found[0][2].items():
        assert float((found[1][2][name] - gradient).abs().max()) < 1e-5 * largest, name
