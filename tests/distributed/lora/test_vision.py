"""Adapters of multimodal models against PEFT on plain transformers, in float64."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from automodel_rl.batch import TokenSequence, pack_microbatch
from automodel_rl.config import ModelConfig, OptimizerConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.estimate.parameter_sizes import empty_parts
from automodel_rl.hf.find import ModelFiles
from automodel_rl.hf.read import read_config
from automodel_rl.lora.peft import AdapterFolder
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.tools.export import merged_tensors, open_weights
from automodel_rl.tools.verify.media import with_media
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_multimodal_model

STEPS, MICROBATCHES, DATA_RANKS = 3, 2, 2
APART = ComponentsConfig.model_validate({"vision": {"ranks": 0}, "language": {"ranks": "1-4", "pp": 2, "dp_shard": 2}})
TWO_AND_TWO = ComponentsConfig.model_validate(
    {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": "2-3", "dp_shard": 2}}
)
HEARING = ComponentsConfig.model_validate(
    {"audio": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": "2-5", "pp": 2, "dp_shard": 2}}
)
LANGUAGE = LoraConfig(rank=4, alpha=8.0)
EVERYWHERE = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "vision", "projector"))
EXPERTS = LoraConfig(rank=4, alpha=8.0, targets=("o_proj", "experts", "projector"))
AUDIO = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "audio", "projector"))
WHOLE_PROJECTOR = LoraConfig(rank=4, alpha=8.0, modules_to_save=("multi_modal_projector",))


def sequences_of(folder: Path, step: int, data_rank: int, microbatch: int) -> list[TokenSequence]:
    seed = 100 * step + 10 * data_rank + microbatch
    sequences = make_sequences(1 + (microbatch + data_rank) % 3, seed)
    return [with_media(sequence, read_config(folder), seed + n) for n, sequence in enumerate(sequences)]


def train(folder: Path, lora: LoraConfig, components: ComponentsConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Trains adapters and writes them before and after; the losses, and what a weight sync sends: the whole model with
    trained adapters merged in."""
    handle = ModelHandle.from_pretrained(
        ModelConfig(path=str(folder), dtype="float64", lora=lora), components=components
    )
    engine = Engine(handle, OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant"))
    handle.save_pretrained(folder / "initial")
    losses = []
    for step in range(STEPS):
        microbatches = [
            pack_microbatch(sequences_of(folder, step, handle.layout.data_rank, microbatch))
            for microbatch in range(0 if handle.layout.is_outsider else MICROBATCHES)
        ]
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    handle.save_pretrained(folder / "trained")
    return losses, {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}


def train_with_peft(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    reference = OneProcess(folder, torch.float64, Training(lr=1e-2), torch.device("cpu"))
    reference.model = PeftModel.from_pretrained(reference.model, folder / "initial", is_trainable=True)
    reference.optimizers = OPTIMIZERS["adamw"].reference(
        reference.model, reference.training.config, reference.run_examples
    )
    losses = []
    for step in range(STEPS):
        everyone = [
            [sequence for m in range(MICROBATCHES) for sequence in sequences_of(folder, step, rank, m)]
            for rank in range(DATA_RANKS)
        ]
        losses.append(reference.backward(everyone))
        reference.step()
    named = reference.model.named_parameters()
    return losses, {n.replace(".default", ""): p.detach() for n, p in named if p.requires_grad}


def logprobs_of_adapters(folder: Path, adapters: Path) -> list[Tensor]:
    """Of some sequences, by adapters that are read from their folder and trained on."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(adapters), dtype="float64"))
    return Engine(handle, OptimizerConfig(decay="constant")).logprobs([pack_microbatch(sequences_of(folder, 0, 1, 1))])


@pytest.mark.parametrize(
    ("family", "lora", "components"),
    [
        ("llava", WHOLE_PROJECTOR, APART),
        ("qwen2_5_vl", LANGUAGE, APART),
        ("qwen3_vl", EVERYWHERE, TWO_AND_TWO),
        ("qwen3_vl_moe", EXPERTS, APART),
        ("qwen2_audio", AUDIO, HEARING),
    ],
    ids=["the projector whole", "language model", "all parts", "experts and projector", "audio"],
)
def test_training_and_files_are_those_of_peft(
    ranks: RankPool, tmp_path: Path, family: str, lora: LoraConfig, components: ComponentsConfig
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    of_ranks = ranks(components.world_size).run(train, tmp_path, lora, components)
    expected_losses, expected = train_with_peft(tmp_path)
    assert of_ranks[0][0] == pytest.approx(expected_losses, rel=1e-9)
    saved = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    named = {name.replace("modules_to_save.", ""): tensor for name, tensor in expected.items()}
    assert saved.keys() == named.keys()
    for name, tensor in named.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-8)

    adapters = AdapterFolder(tmp_path / "trained", merges=True)
    files = ModelFiles(tmp_path, str(tmp_path), adapters)
    source = open_weights(files, read_config(tmp_path))
    sent = {name: tensor for _, of_rank in of_ranks for name, tensor in of_rank.items()}
    adapters.check(empty_parts(read_config(tmp_path), torch.float64, ModelConfig(path=str(tmp_path))))
    for name, tensor in merged_tensors(source, adapters.tensors, adapters.config.scale, torch.float64):
        torch.testing.assert_close(sent[name], tensor, rtol=0, atol=1e-12, msg=name)

    ((again,),) = [ranks(1).run(logprobs_of_adapters, tmp_path, tmp_path / "trained")]
    reference = OneProcess(tmp_path, torch.float64, Training(), torch.device("cpu"))
    reference.model = PeftModel.from_pretrained(reference.model, tmp_path / "trained")
    with torch.no_grad():
        for actual, sequence in zip(again, sequences_of(tmp_path, 0, 1, 1), strict=True):
            torch.testing.assert_close(actual, reference.logprobs(sequence), rtol=0, atol=1e-8)
