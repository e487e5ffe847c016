"""Weights come from safetensors; pickled ones only where they are named, and then nothing but tensors."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from automodel_rl.errors import InputError
from automodel_rl.hf.weight_files import open_tensors, weight_files

PICKLED = "pytorch_model.bin"


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_refused_unless_they_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0).view(2, 3)}, tmp_path / PICKLED)
    with pytest.raises(InputError, match=rf"only {PICKLED}, which may run code .* or name it in model.pickled_weights"):
        weight_files(tmp_path, [])
    (file,) = weight_files(tmp_path, [PICKLED])
    with open_tensors(file) as tensors:
        assert tensors.keys() == ["a"]
        assert tensors.get_slice("a").get_shape() == [2, 3]
        assert tensors.get_slice("a")[0:1].tolist() == tensors.get_tensor("a")[:1].tolist() == [[0.0, 1.0, 2.0]]


def test_nothing_but_tensors_is_unpickled(tmp_path: Path) -> None:
    torch.save({"a": Trap(tmp_path / "sprung")}, tmp_path / PICKLED)
    with (
        pytest.raises(InputError, match=f"{PICKLED}: is not a file of tensors only"),
        open_tensors(tmp_path / PICKLED),
    ):
        pass
    assert not (tmp_path / "sprung").exists()


def test_safetensors_go_before_pickled_weights(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / PICKLED).write_bytes(b"")
    assert weight_files(tmp_path, [PICKLED]) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match="it names files outside the folder"):
        weight_files(tmp_path, [])
