"""A tensor of a checkpoint's files, of which only the part that is asked for is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from automodel_rl.few_bits.formats import Kept
from automodel_rl.parallel.sharding import Box

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""

Opened = Callable[[Path], Any]
"""Gives a weight file with `get_slice` and `get_tensor`."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint.

    Attributes:
        shape: the shape of its plain values.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, opened: Opened, box: Box) -> Tensor:
        """The values in a box: in the file's dtype, or float32 if they are quantized."""
        ...


@runtime_checkable
class PackedTensor(StoredTensor, Protocol):
    """A quantized tensor whose codes and scales may be kept as they are.

    Attributes:
        kept: how a weight of the model is kept then; None if its blocks are not those of the format.
    """

    @property
    def kept(self) -> Kept | None: ...

    def read_packed(self, opened: Opened, box: Box) -> tuple[Tensor, Tensor]:
        """Codes and bytes of scales of whole rows, as in a `FewBitsWeight`. The box is of the stored matrices."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as it is in its file.

    Attributes:
        name: its name there.
        file: the file.
        dtype: safetensors' name of its dtype.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, opened: Opened, box: Box) -> Tensor:
        tensors = opened(self.file)
        return tensors.get_slice(self.name)[box] if self.shape else tensors.get_tensor(self.name)
