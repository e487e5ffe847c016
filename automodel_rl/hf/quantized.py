"""Checkpoint tensors, plain or quantized, of which the requested part is read as plain values.

Supported quantizations: fp8 with a scale per block, row or tensor (DeepSeek-V3, arXiv:2412.19437, section 3.3.2),
MXFP4 (quantized/mxfp4.py), and bitsandbytes' nf4 (quantized/nf4.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.hf.bitsandbytes import NF4Tensor, nf4_tensors
from automodel_rl.hf.stored import DTYPES, Opened, PlainTensor, StoredTensor
from automodel_rl.parallel.sharding import Box
from automodel_rl.quantized import mxfp4, nf4
from automodel_rl.quantized.formats import FP8_BLOCK, QuantizedFormat

FP8 = ("F8_E4M3", "F8_E5M2")
"""safetensors' names of fp8 dtypes."""

SCALES = ("_scale_inv", "_scale")
"""Suffixes of scales after their weight's name. Both kinds multiply it."""

BLOCKS, EXPONENTS = "_blocks", "_scales"
"""Suffixes of MXFP4 tensors after the weight's name."""


@dataclass(frozen=True)
class TransposedTensor:
    """A stack of matrices that are transposed in their file."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        first, rows, columns = self.stored.shape
        return (first, columns, rows)

    def read(self, opened: Opened, box: Box) -> Tensor:
        return self.stored.read(opened, (box[0], box[2], box[1])).mT


@dataclass(frozen=True)
class RoundedTensor:
    """A weight whose values are rounded to nf4 when read."""

    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self, opened: Opened, box: Box) -> Tensor:
        *rows, columns = box
        whole = self.stored.read(opened, (*rows, slice(0, self.shape[-1])))  # the box may cut blocks
        return nf4.dequantize(*nf4.quantize(whole)).to(whole.dtype)[..., columns]


@dataclass(frozen=True)
class ScaledTensor:
    """An fp8 matrix, or a stack of them, with scales.

    Attributes:
        scales: one per block or, with fewer dims than the values, one per row or for all.
    """

    weight: PlainTensor
    scales: PlainTensor
    block: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, opened: Opened, box: Box) -> Tensor:
        values = self.weight.read(opened, box).float()
        return values * self._scales(opened, box, 1)

    @property
    def quantized_format(self) -> QuantizedFormat | None:
        columns = self.block[-1]
        fits = columns == self.shape[-1] or columns % FP8_BLOCK == 0
        return QuantizedFormat("fp8_e4m3" if self.weight.dtype == FP8[0] else "fp8_e5m2") if fits else None

    def read_packed(self, opened: Opened, box: Box) -> tuple[Tensor, Tensor]:
        codes = self.weight.read(opened, box).contiguous().view(torch.uint8)
        scales = self._scales(opened, box, FP8_BLOCK).expand(*codes.shape[:-1], -(-codes.shape[-1] // FP8_BLOCK))
        return codes, scales.contiguous().view(torch.uint8)

    def _scales(self, opened: Opened, box: Box, every: int) -> Tensor:
        """Returns the scales of every `every`-th value of the rows in a box, float32, expandable to its shape."""
        if len(self.scales.shape) < len(self.shape):
            scales = self.scales.read(opened, tuple(slice(0, size) for size in self.scales.shape)).float()
            of_first = scales.view(-1, *[1] * (len(box) - 1))
            return of_first if scales.numel() == 1 else of_first[box[0]]
        blocks = tuple(slice(p.start // size, -(-p.stop // size)) for p, size in zip(box, self.block, strict=True))
        scales = self.scales.read(opened, blocks).float()
        for dim, (part, size) in enumerate(zip(box, self.block, strict=True)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, part.start % size, part.stop - part.start)
        return scales[..., ::every]


@dataclass(frozen=True)
class MXFP4Tensor:
    """Weights of experts, [experts, inputs, outputs], whose transposes are stored in MXFP4.

    Attributes:
        blocks: two values per byte, uint8 [experts, outputs, inputs / 32, 16].
        exponents: of blocks of 32 values, biased by 127, uint8 [experts, outputs, inputs / 32].
    """

    blocks: PlainTensor
    exponents: PlainTensor

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, count, _ = self.blocks.shape
        return (experts, count * mxfp4.BLOCK, outputs)

    def read(self, opened: Opened, box: Box) -> Tensor:
        experts, inputs, outputs = box
        count = slice(inputs.start // mxfp4.BLOCK, -(-inputs.stop // mxfp4.BLOCK))
        whole = slice(count.start * mxfp4.BLOCK, count.stop * mxfp4.BLOCK)
        values = mxfp4.dequantize(*self.read_packed(opened, (experts, outputs, whole)))
        start = inputs.start % mxfp4.BLOCK
        return values[..., start : start + inputs.stop - inputs.start].transpose(1, 2)

    @property
    def quantized_format(self) -> QuantizedFormat | None:
        return QuantizedFormat("mxfp4", is_transposed=True)

    def read_packed(self, opened: Opened, box: Box) -> tuple[Tensor, Tensor]:
        *rows, columns = box
        count = slice(columns.start // mxfp4.BLOCK, columns.stop // mxfp4.BLOCK)
        packed = self.blocks.read(opened, (*rows, count, slice(0, mxfp4.BLOCK // 2)))
        return packed.flatten(-2), self.exponents.read(opened, (*rows, count))


def stored_tensors(
    plain: Mapping[str, PlainTensor], block: tuple[int, int] | None, opened: Opened
) -> dict[str, StoredTensor]:
    """Returns a checkpoint's tensors by name, with quantized ones assembled from their parts.

    Args:
        block: rows and columns of an fp8 block; None if config.json does not specify it.

    Raises:
        InputError: an fp8 tensor has no scales or unsuitable ones, or a tensor is of an unsupported bitsandbytes
            kind.
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
                raise InputError(f"{tensor.file}: {name} is in fp8 but has no scales beside it: copy it again, or use "
                                 "a checkpoint in bfloat16")  # fmt: skip
            found[name] = ScaledTensor(tensor, scales, _block(tensor, scales, block))
            parts.add(scales.name)
    return {**{name: tensor for name, tensor in plain.items() if name not in parts}, **found}


def stored_dtype(stored: StoredTensor) -> torch.dtype:
    """Returns the dtype in which a floating-point tensor's values are read."""
    if isinstance(stored, NF4Tensor):
        return stored.dtype
    name = stored.dtype if isinstance(stored, PlainTensor) else ""  # fp8 and MXFP4 are read as float32
    return next((dtype for dtype, own in DTYPES.items() if own == name), torch.float32)


def _block(weight: PlainTensor, scales: PlainTensor, block: tuple[int, int] | None) -> tuple[int, ...]:
    """Returns the size of the blocks that share a scale, in every dim."""
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
