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


def train(folder: Path, parallel: ParallelConfig, memory: MemoryConfig, trained: bool = True) -> Found:
    """The metric and the gradient norm of a step, and whole gradients of the same batch, on rank 0 of a stage."""
    indexer = IndexerConfig(weight=WEIGHT) if trained else None
    model = ModelConfig(path=str(folder), dtype="float64", indexer=indexer)
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
    ("family", "sizes", "recomputed"),
    [
        ("deepseek_v32", {}, "full"),
        ("deepseek_v32", {"cp": 2, "tp": 2}, "none"),
        ("deepseek_v32", {"tp": 2, "sequence_parallel": True, "pp": 2}, "selective"),
        ("glm_moe_dsa", {"dp_shard": 2, "ep": 2, "fsdp": "reshard"}, "full"),
        ("glm_moe_dsa", {"pp": 2, "cp": 2}, "none"),
    ],
    ids=str,
)
def test_layouts_equal_transformers(ranks: RankPool, tmp_path: Path, family: str, sizes: dict, recomputed: str) -> None:
    save_tiny_model(tmp_path, family)
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
