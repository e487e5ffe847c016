"""Tensors of a checkpoint, plain or quantized. All are read as plain values, only the part that is asked for.

Three kinds of quantized tensors are known: fp8 weights with a scale for each block, row or tensor (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2), MXFP4 (OCP Microscaling Formats 1.0), in which gpt-oss keeps its experts, and nf4 of
bitsandbytes (few_bits/nf4.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.hf.bitsandbytes import NF4Tensor, nf4_tensors
from automodel_rl.hf.stored import DTYPES, Opened, PlainTensor, StoredTensor
from automodel_rl.parallel.sharding import Box

FP8 = ("F8_E4M3", "F8_E5M2")
"""safetensors' names of fp8 dtypes."""

SCALES = ("_scale_inv", "_scale")
"""What the names of scales add to that of their weight. Both multiply it."""

BLOCKS, EXPONENTS = "_blocks", "_scales"
"""What the names of MXFP4 tensors add to that of the weight."""

MXFP4_BLOCK = 32
"""Values of a row that share an exponent; two of them are in a byte, the first in its lower half."""

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1, by their bits."""


@dataclass(frozen=True)
class TurnedTensor:
    """A stack of matrices that are transposed in their file.

    Attributes:
        stored: the stack as it is there.
    """

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        first, rows, columns = self.stored.shape
        return (first, columns, rows)

    def read(self, opened: Opened, box: Box) -> Tensor:
        return self.stored.read(opened, (box[0], box[2], box[1])).mT


@dataclass(frozen=True)
class ScaledTensor:
    """An fp8 matrix, or a stack of them, with scales.

    Attributes:
        weight: the values.
        scales: a scale for each block; or, with fewer dims than the values, for each row or for all.
        block: size of a block in every dim.
    """

    weight: PlainTensor
    scales: PlainTensor
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, opened: Opened, box: Box) -> Tensor:
        values = self.weight.read(opened, box).float()
        if len(self.scales.shape) < len(self.shape):
            scales = self.scales.read(opened, tuple(slice(0, size) for size in self.scales.shape)).float()
            return values * (scales[:, None][box[0]] if scales.numel() > 1 else scales)
        blocks = tuple(slice(p.start // size, -(-p.stop // size)) for p, size in zip(box, self.block, strict=True))
        scales = self.scales.read(opened, blocks).float()
        for dim, (part, size) in enumerate(zip(box, self.block, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, part.start % size, part.stop - part.start)
        return values * scales


@dataclass(frozen=True)
class MXFP4Tensor:
    """Weights of experts, [experts, inputs, outputs], whose transposes are stored in MXFP4.

    Attributes:
        blocks: two values in a byte, uint8 [experts, outputs, inputs / 32, 16].
        exponents: of every block of 32 values, biased by 127, uint8 [experts, outputs, inputs / 32].
    """

    blocks: PlainTensor
    exponents: PlainTensor

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, count, _ = self.blocks.shape
        return (experts, count * MXFP4_BLOCK, outputs)

    def read(self, opened: Opened, box: Box) -> Tensor:
        experts, inputs, outputs = box
        count = slice(inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK))
        packed = self.blocks.read(opened, (experts, outputs, count, slice(0, MXFP4_BLOCK // 2)))
        exponents = self.exponents.read(opened, (experts, outputs, count)).int() - 127
        values = torch.tensor(FP4)[torch.stack([packed & 0xF, packed >> 4], -1).int().flatten(-2)]
        values = torch.ldexp(values, exponents[..., None]).flatten(-2)
        start = inputs.start % MXFP4_BLOCK
        return values[..., start : start + inputs.stop - inputs.start].transpose(1, 2)


def stored_tensors(
    plain: Mapping[str, PlainTensor], block: tuple[int, int] | None, opened: Opened
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name, quantized ones put together from their parts.

    Args:
        plain: all tensors of the files.
        block: rows and columns of a block of fp8 weights; None if config.json does not say.
        opened: the files.

    Raises:
        InputError: an fp8 tensor has no scales, or scales that do not fit it; a tensor is of another kind of
            bitsandbytes'.
    """
    found: dict[str, StoredTensor] = {}
    parts: set[str] = set()
    for name, (tensor_nf4, names) in nf4_tensors(plain, opened).items():
        found[name] = tensor_nf4
        parts.update(names)
    for name, tensor in plain.items():
        if name in found or name in parts:
            continue
        weight = name.removesuffix(BLOCKS)
        if weight != name and f"{weight}{EXPONENTS}" in plain:
            found[weight] = MXFP4Tensor(tensor, plain[f"{weight}{EXPONENTS}"])
            parts.update((name, f"{weight}{EXPONENTS}"))
        elif tensor.dtype in FP8:
            scales = next((plain[name + suffix] for suffix in SCALES if name + suffix in plain), None)
            if scales is None:
                raise InputError(f"{tensor.file}: {name} is in fp8 and has no scales beside it: copy it again, or use "
                                 "a checkpoint in bfloat16")  # fmt: skip
            found[name] = ScaledTensor(tensor, scales, _block(tensor, scales, block))
            parts.add(scales.name)
    return {**{name: tensor for name, tensor in plain.items() if name not in parts}, **found}


def stored_dtype(stored: StoredTensor) -> torch.dtype:
    """The dtype of the values that are read of a tensor of real numbers."""
    if isinstance(stored, NF4Tensor):
        return stored.dtype
    name = stored.dtype if isinstance(stored, PlainTensor) else ""  # fp8 and MXFP4 are read as float32
    return next((dtype for dtype, own in DTYPES.items() if own == name), torch.float32)


def _block(weight: PlainTensor, scales: PlainTensor, block: tuple[int, int] | None) -> tuple[int, ...]:
    """Size of a block that shares a scale, in every dim."""
    *stacked, _, columns = weight.shape
    ones = (1,) * len(stacked)
    if len(scales.shape) < len(weight.shape) and scales.shape in ((), (1,), weight.shape[:1]):
        return weight.shape
    for sizes in ((*ones, 1, columns), None if block is None else (*ones, *block)):
        if sizes is not None and scales.shape == tuple(-(-n // s) for n, s in zip(weight.shape, sizes, strict=True)):
            return sizes
    raise InputError(
        f"{weight.file}: {scales.name} has shape {scales.shape}, which does not fit {weight.name} {weight.shape} with "
        f"blocks of {block}: check quantization_config.weight_block_size in config.json"
    )
