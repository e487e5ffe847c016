"""Tensors in checkpoint files, of which only the requested part is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from automodel_rl.parallel.sharding import Box
from automodel_rl.quantized.formats import QuantizedFormat

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
"""safetensors' dtype names."""

Opened = Callable[[Path], Any]
"""Returns the open weight file of a path, with `get_slice` and `get_tensor`."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint. `shape` is that of its plain values."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, opened: Opened, box: Box) -> Tensor:
        """Returns the values in a box, in the file's dtype, or float32 if they are quantized."""
        ...


@runtime_checkable
class PackedTensor(StoredTensor, Protocol):
    """A quantized tensor whose codes and scales can be used as stored. `quantized_format` is its format as a weight of
    the model; None if its blocks do not match that format."""

    @property
    def quantized_format(self) -> QuantizedFormat | None: ...

    def read_packed(self, opened: Opened, box: Box) -> tuple[Tensor, Tensor]:
        """Returns codes and scale bytes of whole rows, as in a `QuantizedWeight`. The box refers to the stored
        matrices."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """A tensor stored as is. `dtype` is safetensors' name."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, opened: Opened, box: Box) -> Tensor:
        tensors = opened(self.file)
        return tensors.get_slice(self.name)[box] if self.shape else tensors.get_tensor(self.name)
