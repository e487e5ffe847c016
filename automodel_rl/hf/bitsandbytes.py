"""Weights in bitsandbytes files as transformers, Unsloth and others write them. nf4 is read, other kinds are
rejected.

A weight's codes are stored as bytes without its shape. Beside them are the scales of its blocks, which may be
quantized again (double quantization), and a state in JSON with shape, dtype and block sizes. The files' contents
decide, not the list of skipped modules in config.json: mixed files exist.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.hf.stored import Opened, PlainTensor
from automodel_rl.parallel.sharding import Box
from automodel_rl.quantized.formats import QuantizedFormat
from automodel_rl.quantized.nf4 import BLOCK, quantiles_of

STATE = ".quant_state.bitsandbytes__"
"""Suffix of a state's name after its weight's, followed by the kind."""

SCALES, NESTED_SCALES, NESTED_MAP = ".absmax", ".nested_absmax", ".nested_quant_map"
"""Suffixes of scales, of the scales of quantized scales, and of the table of their values."""

PARTS = (SCALES, NESTED_SCALES, NESTED_MAP, ".quant_map")

INT8_SCALES = ".SCB"
"""Suffix of 8-bit weights' scales after the module's name."""


@dataclass(frozen=True)
class NF4Tensor:
    """A weight whose codes are stored in the order of its flattened values.

    Attributes:
        codes: two codes per byte.
        scales: one per block, float32 or an 8-bit code.
        nested: scales and value table of quantized scales, else None.
        offset: added to quantized scales.
        dtype: dtype of the original weight, to which values are rounded.
    """

    codes: PlainTensor
    scales: PlainTensor
    nested: tuple[PlainTensor, PlainTensor] | None
    offset: float
    shape: tuple[int, ...]
    block: int
    nested_block: int
    dtype: torch.dtype

    def read(self, opened: Opened, box: Box) -> Tensor:
        row = math.prod(self.shape[1:])
        start, stop = box[0].start * row // self.block, -(-box[0].stop * row // self.block)
        codes, scales = self._blocks(opened, start, stop)
        values = quantiles_of(codes)  # the last block of a tensor may be short
        values = values * scales.repeat_interleave(self.block)[: len(values)]
        first = box[0].start * row - start * self.block
        rows = values[first : first + (box[0].stop - box[0].start) * row].view(-1, *self.shape[1:])
        return rows[(slice(None), *box[1:])].to(self.dtype)

    @property
    def quantized_format(self) -> QuantizedFormat | None:
        return QuantizedFormat("nf4") if self.block == BLOCK and self.shape[-1] % BLOCK == 0 else None

    def read_packed(self, opened: Opened, box: Box) -> tuple[Tensor, Tensor]:
        row = math.prod(self.shape[1:])
        start, stop = box[0].start * row // self.block, box[0].stop * row // self.block
        codes, scales = self._blocks(opened, start, stop)

        def part(packed: Tensor, size: int) -> Tensor:
            columns = slice(box[-1].start // size, box[-1].stop // size)
            return packed.view(-1, *self.shape[1:-1], self.shape[-1] // size)[(slice(None), *box[1:-1], columns)]

        return part(codes, 2), part(scales, self.block).contiguous().view(torch.uint8)

    def _blocks(self, opened: Opened, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Returns codes, uint8, and scales, float32, of consecutive blocks."""
        # Storage dtypes other than bytes are views of the same bytes.
        num_values = math.prod(self.shape)
        per_element = num_values // math.prod(self.codes.shape)
        first, last = start * self.block // per_element, min(stop * self.block, num_values) // per_element
        stored = self.codes.read(opened, (slice(first, last), slice(0, 1)))
        codes = stored.contiguous().view(torch.uint8).flatten()
        scales = self.scales.read(opened, (slice(start, stop),))
        if self.nested is None:
            return codes, scales.float()
        group = self.nested_block
        of_groups, values = (part.read(opened, tuple(slice(0, n) for n in part.shape)) for part in self.nested)
        factors = of_groups[torch.arange(start, stop) // group]
        return codes, values[scales.int()] * factors + self.offset


def nf4_tensors(plain: Mapping[str, PlainTensor], opened: Opened) -> dict[str, tuple[NF4Tensor, set[str]]]:
    """Returns a checkpoint's nf4 weights by name, each with the names of its parts, given all plain tensors.

    Raises:
        InputError: a weight is of another kind, or a part is missing.
    """
    found = {}
    for name, tensor in plain.items():
        weight, is_state, kind = name.partition(STATE)
        module = name.removesuffix(INT8_SCALES)
        if is_state and kind != "nf4":
            raise InputError(f"{tensor.file}: {weight} is in {kind} of bitsandbytes, but only nf4 is supported: use a "
                             "checkpoint in nf4 or bfloat16")  # fmt: skip
        if module != name and f"{module}.weight" in plain:
            raise InputError(f"{tensor.file}: {module}.weight is in 8 bits of bitsandbytes, but only nf4 is "
                             "supported: use a checkpoint in nf4 or bfloat16")  # fmt: skip
        if is_state:
            found[weight] = (_nf4_tensor(weight, plain, opened), {name} | {weight + part for part in PARTS})
    return found


def _nf4_tensor(name: str, plain: Mapping[str, PlainTensor], opened: Opened) -> NF4Tensor:
    state_tensor = plain[f"{name}{STATE}nf4"]
    text = opened(state_tensor.file).get_tensor(state_tensor.name)
    state = json.loads(bytes(text.tolist()))
    is_nested = "nested_offset" in state
    needed = [name, name + SCALES, *([name + NESTED_SCALES, name + NESTED_MAP] if is_nested else [])]
    missing = [part for part in needed if part not in plain]
    if missing:
        raise InputError(
            f"{state_tensor.file}: {name} is in nf4, but {missing[0]} is missing: copy the checkpoint again"
        )
    return NF4Tensor(
        plain[name],
        plain[name + SCALES],
        (plain[name + NESTED_SCALES], plain[name + NESTED_MAP]) if is_nested else None,
        float(state.get("nested_offset", 0.0)),
        tuple(state["shape"]),
        int(state["blocksize"]),
        int(state.get("nested_blocksize", 1)),
        getattr(torch, state["dtype"]),
    )
