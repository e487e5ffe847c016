"""Checkpoints on disk: what is wrong with them is known before anything is built."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_rl.errors import InputError
from automodel_rl.model.checkpoint_files import check_weights, describe_model, read_config, resolve_checkpoint
from automodel_rl.model.flops import StepFlops
from automodel_rl.model.nemo import build_empty_model
from tests.tiny import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, num_layers=2, dtype=torch.float32)
    return tmp_path


def check(folder: Path) -> None:
    check_weights(folder, build_empty_model(read_config(folder), "transformers", torch.float32, "sdpa", untie=False))


def test_an_intact_checkpoint_passes(folder: Path) -> None:
    check(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no weights: expected model.safetensors"):
        check(folder)


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model.safetensors: damaged or incomplete safetensors file"):
        check(folder)


def test_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"names model-00001-of-00002.safetensors, which is not there"):
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
    with pytest.raises(InputError, match=r"has no config.json"):
        resolve_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json is not a model config of transformers"):
        read_config(tmp_path)


def test_the_description_tells_a_window_that_is_used_from_one_that_is_not(folder: Path) -> None:
    config = read_config(folder)
    assert not describe_model(config).has_sliding_window
    config.layer_types = ["full_attention", "sliding_attention"]
    assert describe_model(config).has_sliding_window


def test_flops_count_attention_within_each_sequence(folder: Path) -> None:
    flops = StepFlops(read_config(folder))
    attention, mlp, head = 32 * 8 * (2 * 4 + 2 * 2), 3 * 32 * 64, 128 * 32
    per_token = 6 * (2 * (attention + mlp) + head)
    assert flops(10) == per_token * 10 + 12 * 2 * 4 * 8 * 55
    assert flops(10) > 2 * flops(5)
