"""Multi-token prediction, against transformers' module, one sequence at a time."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_rl import ModelHandle
from automodel_rl.batch import TokenSequence, pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.critic import CriticConfig
from automodel_rl.config.model import LoraConfig, MTPConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import sft_loss
from tests.mtp_reference import gradients_of_one_process, save_model_with_mtp
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

WEIGHT = 0.3
Found = tuple[float, dict[str, torch.Tensor]]


def config_of(folder: Path, detached: bool = True) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float64", mtp=MTPConfig(weight=WEIGHT, detached=detached))


def sequences_of(rank: int) -> list[TokenSequence]:
    """Of every length from 2 on, others on each rank."""
    short = [TokenSequence(sequence.input_ids[: 2 + rank], sequence.loss_mask[: 2 + rank]) for sequence in
             make_sequences(1, 50 + rank)]  # fmt: skip
    return [*make_sequences(3 + rank, rank), *short]


def train(folder: Path, parallel: ParallelConfig, detached: bool, output: Path) -> Found:
    """The metric of a step, and whole gradients, on rank 0 of a stage. The model is exported."""
    handle = ModelHandle.from_pretrained(config_of(folder, detached), parallel)
    engine = Engine(handle, OptimizerConfig(), total_steps=1)
    sequences = sequences_of(handle.layout.data_rank)
    microbatches = [pack_microbatch(sequences[:2]), pack_microbatch(sequences[2:])]
    _, metrics = engine.forward_backward(microbatches, sft_loss)
    gradients = {name: gradient.clone() for name, gradient in handle.named_hf_gradients()}
    handle.save_pretrained(output)
    return metrics["train/mtp_loss"], gradients


@pytest.mark.parametrize(
    ("family", "sizes", "detached"),
    [
        ("deepseek_v3", {}, True),
        ("deepseek_v3", {"pp": 2, "cp": 2}, False),
        ("deepseek_v3", {"dp_shard": 2, "ep": 2}, True),
        ("glm4_moe", {"pp": 2, "tp": 2, "sequence_parallel": True}, False),
        ("glm4_moe_lite", {"pp": 2, "tp": 2}, True),
        ("glm4_moe", {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}, True),
        ("mimo_v2_flash", {"pp": 2, "cp": 2}, False),
        ("mimo_v2_flash", {"tp": 2, "sequence_parallel": True}, True),
        ("qwen3_next", {"cp": 2}, True),
        ("qwen3_5_text", {"tp": 2, "sequence_parallel": True}, False),
    ],
    ids=str,
)
def test_layouts_equal_transformers_module(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, detached: bool
) -> None:
    save_model_with_mtp(tmp_path / "model", family)
    parallel = ParallelConfig(**sizes)
    found = ranks(parallel.world_size).run(train, tmp_path / "model", parallel, detached, tmp_path / "out")
    everything = [s for rank in range(parallel.dp_shard) for s in sequences_of(rank)]
    loss, expected = gradients_of_one_process(tmp_path / "model", family, everything, WEIGHT, detached)
    assert found[0][0] == pytest.approx(loss, rel=1e-6)
    gradients = {name: gradient for of_rank in found for name, gradient in of_rank[1].items()}
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        difference = float((gradient - expected[name]).abs().max())
        assert difference < 1e-6 * largest, f"{name}: {difference} of {largest}"
    exported = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert exported == load_file(tmp_path / "model" / "model.safetensors").keys()


def step(folder: Path, with_mtp: bool) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, gradient norm and weights of a step whose gradients are clipped."""
    config = config_of(folder) if with_mtp else config_of(folder).model_copy(update={"mtp": None})
    engine = Engine(ModelHandle.from_pretrained(config), OptimizerConfig(lr=1e-3, max_grad_norm=0.01), total_steps=1)
    output = engine.train_step([pack_microbatch(sequences_of(0))], sft_loss)
    return output.loss, output.grad_norm, dict(engine.handle.named_hf_tensors())


def test_a_detached_layer_leaves_the_step_of_the_model_as_it_is(ranks: RankPool, tmp_path: Path) -> None:
    save_model_with_mtp(tmp_path, "deepseek_v3")
    ((loss, norm, weights),) = ranks(1).run(step, tmp_path, True)
    ((plain_loss, plain_norm, plain),) = ranks(1).run(step, tmp_path, False)
    assert (loss, norm) == pytest.approx((plain_loss, plain_norm), rel=1e-9)
    assert plain.keys() < weights.keys()
    assert all(torch.allclose(weights[name], weight, rtol=0, atol=1e-9) for name, weight in plain.items())


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3")
    with pytest.raises(InputError, match=r"model.layers.4"):
        ModelHandle.from_pretrained(config_of(tmp_path))


def test_a_critic_has_no_such_layer(tmp_path: Path) -> None:
    assert CriticConfig().further_model(config_of(tmp_path)).model.mtp is None


def test_adapters_do_not_train_it(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3")
    with pytest.raises(InputError, match=r"model.mtp: its layer is trained in full"):
        ModelHandle.from_pretrained(config_of(tmp_path).model_copy(update={"lora": LoraConfig()}))
