"""Training of routers: load, the auxiliary loss, DeepSeek's bias."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_rl.batch import TokenSequence, empty_microbatch, pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig, MoEConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import Readout, sft_loss
from automodel_rl.mixture.routers import LOAD_METRIC, biases_of
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.step.runner import StepRunner
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model


def gradients_of_routers(folder: Path, moe: MoEConfig, memory: MemoryConfig) -> tuple[dict, dict, float]:
    """Gradients of the gates and loads after one forward and backward of one microbatch, and of an empty one, which
    counts for nothing, on one rank; and the load metric."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", moe=moe), memory=memory)
    microbatches = [pack_microbatch([sequence()]), empty_microbatch()]
    runner = StepRunner(handle)
    runner.forward_backward(
        microbatches, sft_loss, Readout(), {"tokens": 10**9, "sequences": 1, "positions": len(sequence())}
    )
    gates = {n: gather_whole(p.grad, handle.layout) for n, p in handle.named_parameters() if n.endswith("gate.weight")}
    loads = handle.extras[0].router_watch.loads
    return gates, dict(loads), runner.balance_routers()[LOAD_METRIC]


def sequence() -> TokenSequence:
    return make_sequences(1, seed=5, longest=40)[0]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_load_and_auxiliary_loss_are_those_of_the_formula(ranks: RankPool, tmp_path: Path, mode: str) -> None:
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


def move_biases(folder: Path, parallel: ParallelConfig) -> tuple[dict, dict, dict, float]:
    """Biases before and after a step, this rank's loads in it, and the load metric."""
    moe = MoEConfig(bias_update_rate=0.01)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", moe=moe), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-6, decay="constant"))
    watch = handle.extras[0].router_watch
    before = {number: bias.clone() for number, bias in biases_of(watch.layers, watch.family).items()}
    output = engine.train_step([pack_microbatch(make_sequences(3, seed=handle.layout.data_rank))], sft_loss)
    after = {number: bias.clone() for number, bias in biases_of(watch.layers, watch.family).items()}
    return before, after, dict(watch.loads), output.metrics[LOAD_METRIC]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("deepseek_v3", {"dp_shard": 2, "ep": 2}),
        ("minimax_m2", {"tp": 2, "sequence_parallel": True, "ep": 2}),
        ("ernie4_5_moe", {"dp_shard": 2, "ep": 2}),
    ],
    ids=str,
)
def test_biases_move_against_the_load_alike_on_all_ranks(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family, num_layers=2)
    results = ranks(2).run(move_biases, tmp_path, ParallelConfig(**sizes))
    for before, after, _, metric in results:
        for layer, bias in before.items():
            load = sum(loads[layer] for _, _, loads, _ in results)
            torch.testing.assert_close(
                after[layer] - bias, (0.01 * (load.mean() - load).sign().to(bias.dtype)).view_as(bias)
            )
            assert (load != load.mean()).any()
        assert before
        assert metric == results[0][3] >= 1
