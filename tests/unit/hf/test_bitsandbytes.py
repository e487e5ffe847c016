"""Checkpoints of bitsandbytes, as transformers writes them, against bitsandbytes' own values."""

import json
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import peft
import pytest
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from automodel_rl.config import ModelConfig
from automodel_rl.config.model import Base, LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.estimate.parameter_sizes import causal_model, empty_parts
from automodel_rl.families.known import checkpoint_family
from automodel_rl.hf.bitsandbytes import NF4Tensor
from automodel_rl.hf.find import find_model
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.hf.quantized import RoundedTensor
from automodel_rl.hf.read import Checkpoint, read_config, read_whole_config
from automodel_rl.hf.stored import PlainTensor
from automodel_rl.hf.weight_files import open_tensors
from automodel_rl.lora.add import add_adapters
from automodel_rl.lora.peft import AdapterFolder, AdapterOrigin, write_adapters
from automodel_rl.quantized.base import names_of_base
from automodel_rl.quantized.nf4 import dequantize, quantize
from automodel_rl.tools.export import merged_tensors
from tests.quantized import NF4_SIZES, save_nf4_model
from tests.tiny import tiny_config

UP, DOWN = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(find_model(ModelConfig(path=str(folder))), read_config(folder))


def values_of(weight: Any) -> torch.Tensor:
    """What bitsandbytes makes of a weight. Its kernel for CPUs with AVX-512 is wrong for some widths; this is not."""
    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = bitsandbytes.functional.dequantize_blockwise(scales, state.state2) + state.offset
    codes, shape = weight.data.view(torch.uint8).flatten(), tuple(state.shape)
    with torch.compiler.set_stance("force_eager"):
        return _dequantize_4bit_compute(codes, scales, state.code, state.blocksize, shape, state.dtype)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_values_are_those_of_bitsandbytes(tmp_path: Path, is_nested: bool, storage: torch.dtype) -> None:
    model = save_nf4_model(tmp_path, is_nested=is_nested, storage=storage)
    found = checkpoint(tmp_path)
    assert sorted(found.names) == sorted(model.state_dict().keys() & {*found.names})
    for name, parameter in model.named_parameters():
        expected = values_of(parameter) if hasattr(parameter, "quant_state") else parameter
        assert torch.equal(found.read(name), expected), name


def test_every_part_of_a_weight_is_read_by_itself(tmp_path: Path) -> None:
    save_nf4_model(tmp_path, is_nested=True)
    tensor = checkpoint(tmp_path)._tensors[DOWN]  # rows of three blocks
    assert isinstance(tensor, NF4Tensor)
    rows, columns = tensor.shape
    with open_tensors(tmp_path / "model.safetensors") as opened:
        whole = tensor.read(lambda _: opened, (slice(0, rows), slice(0, columns)))
        for box in (
            (slice(5, 9), slice(0, columns)),
            (slice(0, rows), slice(3, 70)),
            (slice(rows - 1, rows), slice(1)),
        ):
            box = tuple(slice(part.start or 0, part.stop) for part in box)
            assert torch.equal(tensor.read(lambda _: opened, box), whole[box])
        half = (slice(3, rows), slice(64, 128))
        codes, scales = tensor.read_packed(lambda _: opened, half)
    assert torch.equal(dequantize(codes, scales.view(torch.float32)).bfloat16(), whole[half])
    assert codes.shape == (rows - 3, 32)


@pytest.mark.parametrize("shape", [(33, 192), (7, 2880), (3, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    values.view(-1)[:64] = 0
    expected, state = bitsandbytes.functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    codes, scales = quantize(values)
    assert torch.equal(codes.flatten(), expected.flatten())
    assert torch.equal(scales.flatten(), state.absmax)
    assert codes.shape[-1] == shape[-1] // 2


def test_codes_of_values_that_were_quantized_are_the_same() -> None:
    codes, scales = quantize(torch.randn(5, 128, generator=torch.Generator().manual_seed(1)))
    again = quantize(dequantize(codes, scales))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({UP + ".absmax": None}, r"up_proj.weight is in nf4, but .*up_proj.weight.absmax is missing: copy the"),
        (
            {UP + ".quant_state.bitsandbytes__nf4": None, UP + ".quant_state.bitsandbytes__fp4": torch.zeros(1)},
            "up_proj.weight is in fp4 of bitsandbytes, but only nf4 is supported: use a checkpoint in nf4",
        ),
        ({UP.replace("weight", "SCB"): torch.zeros(1)}, "up_proj.weight is in 8 bits of bitsandbytes, but only nf4"),
        (
            {"model.norm.weight": torch.zeros(64, dtype=torch.int8)},
            r"model.norm.weight is stored in integers \(I8\), a quantization that is not supported",
        ),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, changed: dict[str, torch.Tensor | None], text: str) -> None:
    save_nf4_model(tmp_path, is_nested=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    tensors = {**load_file(tmp_path / "model.safetensors"), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=text):
        checkpoint(tmp_path).check(model)


SAVED = "model.layers.1.self_attn.o_proj.weight"


def test_exports_have_what_a_base_in_nf4_stands_for(tmp_path: Path) -> None:
    save_nf4_model(tmp_path, is_nested=True)
    (part,) = empty_parts(read_whole_config(tmp_path / "plain"), torch.bfloat16, ModelConfig(path="x"))
    plain = checkpoint(tmp_path / "plain")
    for folder in (tmp_path, tmp_path / "plain"):
        before, source = checkpoint(folder), checkpoint(folder)
        source.read_base_in_nf4(part, {SAVED})
        for name, tensor in merged_tensors(source, {}, 1.0, torch.bfloat16):
            in_nf4 = name.endswith("proj.weight") and name != SAVED
            right = dequantize(*quantize(plain.read(name))).bfloat16() if in_nf4 else plain.read(name)
            assert torch.equal(tensor, right if folder != tmp_path else before.read(name)), name
            assert not in_nf4 or not torch.equal(tensor, plain.read(name))


def test_adapters_of_a_folder_may_be_trained_on_a_base_in_nf4(tmp_path: Path) -> None:
    save_nf4_model(tmp_path, is_nested=False)
    folder = tmp_path / "adapters"
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.zeros(shape)
        for side, shape in (("A", (4, 64)), ("B", (64, 4)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    asked = ModelConfig(path=str(tmp_path / "plain"), adapters=str(folder), lora=LoraConfig(base="nf4", rank=4))
    lora = OpenedModel.open(asked).model.lora
    assert lora is not None
    assert (lora.base, lora.rank, lora.targets) == ("nf4", 4, ("q_proj",))


@pytest.mark.parametrize(
    ("trained_on", "asked", "goes_on_with"),
    [
        ("nf4", {}, "nf4"),
        ("nf4", {"rank": 4}, "nf4"),
        ("nf4", {"base": "nf4"}, "nf4"),
        ("nf4", {"base": "plain"}, None),
        ("nf4", {"base": "stored"}, None),
        ("stored", {}, "stored"),
        ("stored", {"base": "plain"}, "plain"),
        ("stored", {"base": "nf4"}, None),
        ("plain", {"base": "nf4"}, "nf4"),  # of which the folder says nothing
    ],
)
def test_a_folder_of_adapters_says_on_which_base_they_were_trained(
    tmp_path: Path, trained_on: Base, asked: dict[str, Any], goes_on_with: Base | None
) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    origin = AdapterOrigin(LoraConfig(rank=4, base=trained_on), str(tmp_path), checkpoint_family(tiny_config("llama")))
    (tmp_path / "adapters").mkdir()
    write_adapters(tmp_path / "adapters", tensors, origin)
    peft.LoraConfig.from_pretrained(tmp_path / "adapters").save_pretrained(tmp_path / "adapters")
    assert AdapterFolder(tmp_path / "adapters").config.base == trained_on  # PEFT's own files keep it
    model = ModelConfig(path=str(tmp_path / "adapters"), lora=LoraConfig(**asked) if asked else None)
    if goes_on_with is None:
        with pytest.raises(InputError, match=f"base={asked['base']}: .* were trained on base={trained_on},"):
            find_model(model)
    else:
        lora = find_model(model).lora
        assert lora is not None
        assert lora.base == goes_on_with


def test_a_part_of_a_weight_is_read_as_the_whole_is_in_nf4(tmp_path: Path) -> None:
    values = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "weights.safetensors"
    save_file({"weight": values}, file)
    rounded = RoundedTensor(PlainTensor("weight", file, (4, 128), "F32"))
    with open_tensors(file) as tensors:
        part = rounded.read(lambda _: tensors, (slice(1, 3), slice(32, 100)))
    assert torch.equal(part, dequantize(*quantize(values))[1:3, 32:100])


def test_a_model_that_is_not_trained_keeps_its_adapters_plain(tmp_path: Path) -> None:
    model = causal_model(tiny_config("llama", 2, **NF4_SIZES), dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=64))
    model.requires_grad_(False)
    assert {name for name, _ in names_of_base(model)} == {
        name for name, _ in model.named_parameters() if name.endswith("proj.weight")
    }
