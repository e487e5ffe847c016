"""Compiled layers on CUDA: one compilation, whatever microbatches hold."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import Microbatch, pack_microbatch
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

pytestmark = pytest.mark.gpu


def microbatches_of(num_sequences: int) -> list[Microbatch]:
    return [pack_microbatch(make_sequences(num_sequences + m, seed=10 * num_sequences + m)) for m in range(2)]


def train(folder: Path, recomputed: str, compiled: bool) -> tuple[list[float], list[int]]:
    """Losses of steps with ever more sequences in a row, and the graphs that there were after each."""
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    memory = MemoryConfig(compile=compiled, activation_checkpointing=recomputed)
    engine = Engine(ModelHandle.from_pretrained(model, memory=memory), OptimizerConfig(lr=1e-3, decay="constant"))
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    losses, graphs = [], []
    for num_sequences in range(2, 14):
        losses.append(engine.train_step(microbatches_of(num_sequences), sft_loss).loss)
        engine.logprobs(microbatches_of(num_sequences))
        graphs.append(counters["stats"]["unique_graphs"] - before)
    return losses, graphs


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_rows_with_other_numbers_of_sequences_compile_nothing_anew(
    ranks: RankPool, tmp_path: Path, family: str, recomputed: str
) -> None:
    save_tiny_model(tmp_path, family, dtype=torch.bfloat16, head_dim=64, num_layers=10)
    ((eager, _),) = ranks(1).run(train, tmp_path, recomputed, False)
    ((losses, graphs),) = ranks(1).run(train, tmp_path, recomputed, True)
    assert graphs[1] > 0
    assert graphs[2:] == [graphs[1]] * 10, graphs
    assert losses == pytest.approx(eager, rel=2e-2)
