"""Training of routers: load, the auxiliary loss, DeepSeek's bias."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_rl.batch import TokenSequence, pack_row
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.config.model import MoEConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from automodel_rl.losses import Readout, sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.routers import LOAD_METRIC
from automodel_rl.parallel.sharding import gather_whole
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

Ranks = Callable[[int], RankPool]


def gradients_of_routers(folder: Path, moe: MoEConfig, memory: MemoryConfig) -> tuple[dict, dict, float]:
    """Gradients of the gates and loads after one forward and backward of one row on one rank, and the load metric."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", moe=moe), memory=memory)
    rows = [pack_row([sequence()])]
    handle.forward_backward(rows, sft_loss, Readout(), {"tokens": 10**9, "sequences": 1, "positions": len(sequence())})
    gates = {n: gather_whole(p.grad, handle.layout) for n, p in handle.named_parameters() if n.endswith("gate.weight")}
    loads = handle.parts[0].router_watch.loads
    return gates, dict(loads), handle.balance_routers()[LOAD_METRIC]


def sequence() -> TokenSequence:
    return make_sequences(1, seed=5, longest=40)[0]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_load_and_auxiliary_loss_are_those_of_the_formula(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", num_layers=2)
    memory = MemoryConfig(activation_checkpointing=mode)
    gates, loads, metric = ranks(1).run(gradients_of_routers, tmp_path, MoEConfig(aux_loss=0.5), memory)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    logits = model(sequence().input_ids[None], output_router_logits=True).router_logits
    total = torch.zeros((), dtype=torch.float64)
    for number, of_layer in enumerate(logits):
        chosen = of_layer.topk(2, dim=-1).indices
        load = torch.bincount(chosen.flatten(), minlength=4)
        assert torch.equal(loads[number].long(), load)
        total = total + 0.5 * 4 * (load / load.sum() * of_layer.softmax(-1).mean(0)).sum()
    total.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if n.endswith("gate.weight")}
    for name, gradient in gates.items():  # the loss itself is scaled away
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
    assert metric >= 1


def move_biases(folder: Path, parallel: ParallelConfig) -> tuple[dict, dict, float]:
    moe = MoEConfig(bias_update_rate=0.01)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", moe=moe), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-6, decay="constant"))
    before = {n: r.e_score_correction_bias.clone() for n, r in handle.parts[0].router_watch.routers.items()}
    output = engine.train_step([pack_row(make_sequences(3, seed=handle.layout.data_rank))], sft_loss)
    after = {n: r.e_score_correction_bias.clone() for n, r in handle.parts[0].router_watch.routers.items()}
    return before, after, output.metrics[LOAD_METRIC]


def save_and_load(folder: Path) -> bool:
    """Whether biases that moved come back from a checkpoint."""
    model = ModelConfig(path=str(folder), dtype="float64", moe=MoEConfig(bias_update_rate=0.01))
    engine = Engine(ModelHandle.from_pretrained(model), OptimizerConfig(lr=1e-6, decay="constant"))
    engine.train_step([pack_row(make_sequences(3, seed=1))], sft_loss)
    save_checkpoint(engine, folder / "step_1", {}, {})
    resumed = Engine(ModelHandle.from_pretrained(model), OptimizerConfig(lr=1e-6, decay="constant"))
    load_checkpoint(resumed, folder / "step_1")
    trained, loaded = (e.handle.parts[0].router_watch.routers for e in (engine, resumed))
    return all(torch.equal(trained[n].e_score_correction_bias, loaded[n].e_score_correction_bias) for n in trained)


def test_biases_are_kept_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", num_layers=2)
    assert ranks(1).run(save_and_load, tmp_path) == [True]


def test_biases_move_against_the_load_alike_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", num_layers=2)
    results = ranks(2).run(move_biases, tmp_path, ParallelConfig(dp_shard=2, ep=2))
    for before, after, _ in results:
        for layer, bias in before.items():
            moved = (after[layer] - bias).abs()
            assert ((moved - 0.01).abs() < 1e-6).logical_or(moved == 0).all()
            assert moved.any()
            assert torch.equal(after[layer], results[0][1][layer])
    assert results[0][2] == results[1][2] >= 1
