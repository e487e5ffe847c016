"""Checkpoints on disk: what is wrong with them is known before anything is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.families.known import checkpoint_family
from automodel_rl.hf.find import ModelFiles, find_model
from automodel_rl.hf.names import to_hf
from automodel_rl.hf.read import Checkpoint, persistent_tensors, read_config
from automodel_rl.model.build import build_empty_model
from automodel_rl.model.flops import StepFlops
from automodel_rl.model.fused_norm import plain_norms
from automodel_rl.tools.verify.one_process import name_in_layout
from tests.tiny import save_tiny_model
from tests.tiny_families import SIZES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, num_layers=2, dtype=torch.float32)
    return tmp_path


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder, str(folder))


def check(folder: Path) -> None:
    config = read_config(folder)
    empty = build_empty_model(config, "transformers", torch.float32, "automodel_rl_sdpa", untie=False).language
    Checkpoint(files_of(folder), config).check(empty)


def test_an_intact_checkpoint_passes(folder: Path) -> None:
    check(folder)


def test_tensors_that_no_part_of_the_model_has_are_known(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    config = read_config(folder)
    empty = build_empty_model(config, "transformers", torch.float32, "automodel_rl_sdpa", untie=False)
    assert Checkpoint(files_of(folder), config).unused(empty.parts) == ["mtp.norm.weight"]


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no weights: expected model.safetensors"):
        check(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model.safetensors: damaged or incomplete safetensors file"):
        check(folder)


def test_a_missing_shard_is_refused(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"names model-00001-of-00002.safetensors, which does not exist"):
        check(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "the checkpoint has no tensor model.norm.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight has shape \(3,\) in the weights but \(32,\) by config.json",
        ),
    ],
)
def test_missing_and_misshapen_tensors(folder: Path, change, message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=message):
        check(folder)


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: folder does not exist: pass the folder of"):
        find_model(ModelConfig(path=str(tmp_path / "none")))
    with pytest.raises(InputError, match=r"has no config.json"):
        find_model(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json is not a model config of transformers"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", list(SIZES))
def test_a_model_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    config = read_config(tmp_path)
    model = build_empty_model(config, "transformers", torch.float64, "automodel_rl_eager", untie=False).language
    checkpoint = Checkpoint(files_of(tmp_path), config)
    assert checkpoint.unused([model]) == []
    checkpoint.fill(model, torch.device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    ).state_dict()
    expected = {name_in_layout(name): tensor for name, tensor in expected.items()}
    actual = model.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(actual[name].dtype)), name  # biases of routers are kept in fp32


@pytest.mark.parametrize("family", list(SIZES))
def test_names_and_tensors_of_files_come_back(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    known = checkpoint_family(read_config(tmp_path), stored)
    exported = dict(piece for name, t in persistent_tensors(model) for piece in to_hf(name, t.detach(), known))
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("has_other_norms", [False, True])
def test_published_names_of_olmo_hybrid_are_read(tmp_path: Path, has_other_norms: bool) -> None:
    """Unlike those that transformers writes: three convolutions of their own widths, and norms by the kind of layer."""
    save_tiny_model(tmp_path, "olmo_hybrid", num_layers=2)
    config = read_config(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    keys, values = 4 * 8, 8 * 8
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("conv1d.weight"):
            pieces = tensor.split((keys, keys, values))
            tensors |= {name.replace("conv1d", f"{n}_conv1d"): piece for n, piece in zip("qkv", pieces, strict=True)}
        elif has_other_norms and ".layers.0." in name:  # the layer with linear attention
            name = name.replace("input_layernorm", "attention_layer_norm")
            tensors[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = tensor
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    built = build_empty_model(config, "transformers", torch.float64, "automodel_rl_eager", untie=False).language
    checkpoint = Checkpoint(files_of(tmp_path), config)
    checkpoint.check(built)
    assert checkpoint.unused([built]) == []
    checkpoint.fill(built, torch.device("cpu"))
    expected = {name_in_layout(name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_a_family_under_another_name_is_read_without_the_code_of_its_checkpoint(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", num_layers=2)
    values = json.loads((tmp_path / "config.json").read_text())
    ours = read_config(tmp_path).to_dict()
    named = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps({**values, **named, "architectures": ["DeepseekV3ForCausalLM"]}))
    assert read_config(tmp_path).to_dict() == {**ours, "_name_or_path": ""}


def test_flops_count_attention_within_each_sequence(folder: Path) -> None:
    empty = build_empty_model(read_config(folder), "transformers", torch.float32, "automodel_rl_sdpa", untie=False)
    flops = StepFlops(empty.language)
    attention, mlp, head = 32 * 8 * (2 * 4 + 2 * 2), 3 * 32 * 64, 128 * 32
    per_token = 6 * (2 * (attention + mlp) + head)
    assert flops(10) == per_token * 10 + 12 * 2 * 4 * 8 * 55
    assert flops(10) > 2 * flops(5)


def test_frozen_weights_cost_no_weight_gradients(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = StepFlops(model).per_token
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert StepFlops(model).per_token == pytest.approx(whole * 4 / 6)


def test_norms_of_torch_are_fused_already() -> None:
    part = nn.ModuleList([nn.RMSNorm(4), Qwen3RMSNorm(4)])
    assert list(plain_norms(part)) == [part[1]]
