"""Quantized checkpoints, read as plain weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.find import find_model
from automodel_rl.hf.quantized import stored_tensors
from automodel_rl.hf.read import Checkpoint, read_config
from automodel_rl.hf.stored import PlainTensor
from automodel_rl.hf.weight_files import open_tensors
from tests.quantized import BLOCK, save_fp8_model, save_mxfp4_model, to_fp8


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(find_model(ModelConfig(path=str(folder))), read_config(folder))


def test_mxfp4_experts_are_those_that_transformers_reads(tmp_path: Path) -> None:
    save_mxfp4_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    found = checkpoint(tmp_path)
    expected = model.state_dict()
    assert sorted(found.names) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found.read(name).bfloat16(), tensor), name


@pytest.mark.parametrize("block", [BLOCK, (1, 40), (50, 40), (7, 3)])
def test_every_part_of_an_fp8_matrix_is_the_product_of_value_and_scale(tmp_path: Path, block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values, scales = to_fp8(torch.randn(50, 40), block)
    file = tmp_path / "weights.safetensors"
    save_file({"w": values, "w_scale_inv": scales}, file)
    plain = {
        "w": PlainTensor("w", file, (50, 40), "F8_E4M3"),
        "w_scale_inv": PlainTensor("w_scale_inv", file, tuple(scales.shape), "F32"),
    }
    with open_tensors(file) as opened:
        (tensor,) = stored_tensors(plain, block, lambda _: opened).values()
    rows, columns = torch.arange(50) // block[0], torch.arange(40) // block[1]
    whole = values.float() * scales[rows][:, columns]
    with open_tensors(file) as opened:
        for box in ((slice(0, 50), slice(0, 40)), (slice(13, 31), slice(5, 39)), (slice(49, 50), slice(0, 1))):
            assert torch.equal(tensor.read(lambda _: opened, box), whole[box])


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_fp8_model(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    save_file({**tensors, name: tensors[name][:1]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj.weight_scale_inv has shape \(1, 2\), which does not fit"):
        checkpoint(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj.weight is in fp8 but has no scales beside it"):
        checkpoint(tmp_path)
