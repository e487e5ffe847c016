"""A checkpoint's weight files: safetensors, or pickled tensors that the user has explicitly named."""

import contextlib
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.hf.names import INDEX, SINGLE


def weight_files(folder: Path, pickled: Sequence[str]) -> list[Path]:
    """Returns a checkpoint's weight files. The folder is untrusted; of pickled files, only the named ones may be
    read, and only without safetensors.

    Raises:
        InputError: there is no file that may be read.
    """
    if (folder / INDEX).is_file():
        return _named_in_index(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    there = sorted(path.name for path in folder.glob("*.bin"))
    if there and all(name in pickled for name in there):
        return [folder / name for name in there]
    if there:
        raise InputError(
            f"{folder}: no weights in safetensors, only {', '.join(there)}, which may run code when read: save the "
            "model with save_pretrained (safetensors), or name it in model.pickled_weights"
        )
    raise InputError(
        f"{folder}: no weights: expected {SINGLE} or {INDEX}; save the model with save_pretrained (safetensors) first"
    )


def _named_in_index(folder: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files outside the folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{folder / INDEX}: damaged or incomplete ({error}): copy or download it again") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder}: {INDEX} names {missing[0]}, which does not exist: copy or download it again")
    return [folder / name for name in names]


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Opens a weight file with the interface of `safetensors.safe_open`: `keys`, `get_tensor` and `get_slice`.

    Raises:
        InputError: the file is damaged, or pickled and holds anything but tensors.
    """
    if file.suffix == ".bin":
        yield _PickledTensors(file)
        return
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: damaged or incomplete safetensors file ({error}): copy or download it again"
        ) from None


class _PickledTensors:
    """A pickled file with the interface of `safetensors.safe_open`. Only tensors are unpickled."""

    def __init__(self, file: Path):
        try:
            try:
                self._tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of older versions cannot be mapped
                self._tensors = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(self._tensors, dict) or not all(isinstance(t, Tensor) for t in self._tensors.values()):
                raise pickle.UnpicklingError("it holds other objects")
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            reason = describe_root_cause(error)[:200]
            raise InputError(f"{file}: is not a file of tensors only ({reason}): do not use it") from None

    def keys(self) -> list[str]:
        return [*self._tensors]

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self._tensors[name])


class _PickledSlice:
    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self._tensor.shape]

    def get_dtype(self) -> str:
        return str(self._tensor.dtype)

    def __getitem__(self, box: Any) -> Tensor:
        return self._tensor[box]
