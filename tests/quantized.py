"""Writes tiny checkpoints with quantized weights, in the forms that are on the hub."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from automodel_rl.quickstart.model import train_tokenizer
from tests.tiny import save_tiny_model

VOCAB = 320
SIZES = {"hidden_size": 64, "intermediate_size": 32}
"""Multiples of MXFP4's blocks."""

BLOCK = (24, 16)
"""Rows and columns of a block of fp8 weights; the rows divide no weight's."""


def save_fp8_model(
    folder: Path, family: str, *, by_rows: bool = False, block: tuple[int, int] = BLOCK, **sizes: Any
) -> None:
    """A tiny model with fp8 projections, with scales of blocks as DeepSeek's files have, or of rows."""
    save_tiny_model(folder, family, dtype=torch.bfloat16, vocab_size=VOCAB, **sizes)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight"):
            tensors[name], scales = to_fp8(weight, (1, weight.shape[1]) if by_rows else block)
            tensors[name + ("_scale" if by_rows else "_scale_inv")] = scales
    if by_rows:
        settings: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    else:
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [*block]}
    _write(folder, tensors, settings)


def to_fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, and the scale of each block."""
    values = weight.float()
    grid = [-(-size // step) for size, step in zip(values.shape, block, strict=True)]
    scales = torch.empty(grid)
    for row in range(grid[0]):
        for column in range(grid[1]):
            place = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scales[row, column] = values[place].abs().max() / 448
            values[place] /= scales[row, column]
    return values.to(torch.float8_e4m3fn), scales


def save_mxfp4_model(folder: Path) -> None:
    """A tiny gpt-oss with random experts in MXFP4, as its files on the hub have them."""
    save_tiny_model(folder, "gpt_oss", dtype=torch.bfloat16, vocab_size=VOCAB, **SIZES)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
    _write(folder, tensors, {"quant_method": "mxfp4"})


NF4_SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
"""Multiples of nf4's blocks."""


def save_nf4_model(
    folder: Path, family: str = "llama", *, is_nested: bool, storage: torch.dtype = torch.uint8, **sizes: Any
) -> Any:
    """A tiny model whose linear layers transformers has quantized to nf4 by bitsandbytes. Returns the quantized model.

    Args:
        folder: the folder to write.
        family: the model's family.
        is_nested: whether scales are quantized, too.
        storage: the dtype as which codes are stored.
        sizes: sizes of the model.
    """
    save_tiny_model(folder / "plain", family, dtype=torch.bfloat16, vocab_size=VOCAB, **NF4_SIZES | sizes)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=is_nested,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


def _write(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    train_tokenizer(["a text"], VOCAB).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": settings}))
