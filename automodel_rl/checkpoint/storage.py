"""Storage for torch's distributed checkpoint (DCP): a safetensors file for each rank, and one index in JSON.

DCP plans what each rank writes and reads, also from one layout to another. Its own formats use pickle, or build a
rank's whole file in memory. The files here are written as a stream, and any program that reads safetensors can read
them.
"""

import contextlib
import ctypes
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from automodel_rl.checkpoint.folder import INDEX, CheckpointError, read_json, write_hashed
from automodel_rl.hf.stored import DTYPES
from automodel_rl.manifest import StoredFile
from automodel_rl.parallel.sharding import Box

ALIGNMENT = 8
"""The header of a safetensors file is padded to a multiple of this many bytes."""


@dataclass(frozen=True)
class WritePlan:
    """The tensors that a rank writes. They are the same for every checkpoint of the same tensors on the same layout.

    Attributes:
        keys: keys of the tensors.
        index: content of the index on the rank that writes it; None on all others.
    """

    keys: list[str]
    index: str | None = None


class SafetensorsWriter(StorageWriter):
    """Writes this rank's shards.

    Args:
        folder: an existing folder.
        rank: the rank of this process.
        shards: this rank's shard of every tensor, by key, on any device.

    Attributes:
        written: files that this rank has written, by name.
        plan: the tensors that this rank writes; None until DCP has planned them.
    """

    def __init__(self, folder: Path, rank: int, shards: dict[str, Tensor]):
        self.folder, self.file, self.shards = folder, f"rank_{rank:05d}.safetensors", shards
        self.written: dict[str, StoredFile] = {}
        self.plan: WritePlan | None = None

    def write(self, plan: WritePlan) -> None:
        """Writes the tensors of a plan that a writer of the same tensors had before, without DCP."""
        self.plan = plan
        if plan.keys:
            tensors = [(key, self.shards[key]) for key in plan.keys]
            self.written[self.file] = _write_file(self.folder / self.file, tensors)
        self._write_index(plan.index)

    def _write_index(self, index: str | None) -> None:
        if index is not None:
            self.written[INDEX] = write_hashed(self.folder / INDEX, index)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Does nothing: the folder is an argument of the constructor."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: every rank has a file of its own."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        self.write(WritePlan([item.index.fqn for item in plan.items]))
        done.set_result([_result(item, self.file) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index = {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = [
                {"file": files[MetadataIndex(key, chunk.offsets)], "offsets": [*chunk.offsets], "shape": [*chunk.sizes]}
                for chunk in tensor.chunks
            ]
            index[key] = {"dtype": DTYPES[tensor.properties.dtype], "shape": [*tensor.size], "chunks": chunks}
        assert self.plan is not None
        self.plan = WritePlan(self.plan.keys, json.dumps(index))
        self._write_index(self.plan.index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _result(item: WriteItem, file: str) -> WriteResult:
    size = item.tensor_storage_size()
    return WriteResult(item.index, size_in_bytes=0 if size is None else size, storage_data=file)


def _write_file(path: Path, tensors: list[tuple[str, Tensor]]) -> StoredFile:
    """Writes a safetensors file to the disk, tensor by tensor. Other threads can run during the large writes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors:
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    state, size = xxhash.xxh3_128(), 0
    with path.open("wb") as file:
        for piece in itertools.chain([len(text).to_bytes(8, "little"), text], _contents(tensors)):
            file.write(piece)
            state.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(size, state.hexdigest())


def _contents(tensors: list[tuple[str, Tensor]]) -> Iterator[Any]:
    """The bytes of every tensor. Tensors on the host are not copied.

    NumPy is not used: it would fix the size of a storage for ever, and storages of offloaded moments shrink to 0 later.
    """
    for _, tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            yield memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).cast("B")


class SafetensorsReader(StorageReader):
    """Reads the tensors that any number of ranks have written with `SafetensorsWriter`.

    Args:
        folder: the folder with the checkpoint's tensors.

    Raises:
        CheckpointError: the index is damaged, or names files outside the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[MetadataIndex, str] = {}
        try:
            self._tensors = {key: self._tensor(key, of) for key, of in read_json(folder / INDEX).items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder / INDEX}: damaged ({type(error).__name__}: {error})") from None

    def _tensor(self, key: str, of: dict[str, Any]) -> TensorStorageMetadata:
        chunks = []
        for chunk in of["chunks"]:
            if Path(chunk["file"]).name != chunk["file"]:
                raise ValueError(f"{chunk['file']!r} is not a file of the folder")
            place = ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"]))
            self._files[MetadataIndex(key, place.offsets)] = chunk["file"]
            chunks.append(place)
        if sum(math.prod(place.sizes) for place in chunks) != math.prod(of["shape"]):
            raise ValueError(f"the shards of {key} do not make up its shape {of['shape']}")
        dtype = next(dtype for dtype, name in DTYPES.items() if name == of["dtype"])
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(of["shape"]), chunks)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole tensors, by key."""
        return {key: of.size for key, of in self._tensors.items()}

    def read(self, key: str) -> Tensor:
        """A whole tensor, on the host."""
        of = self._tensors[key]
        whole = torch.empty(of.size, dtype=of.properties.dtype)
        for chunk in of.chunks:
            box = _box(chunk.offsets, chunk.sizes)
            with self._open(self._files[MetadataIndex(key, chunk.offsets)]) as tensors:
                whole[box] = tensors.get_tensor(key)
        return whole

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Does nothing: the folder is an argument of the constructor."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({**self._tensors})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the index has been read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with self._open(file) as tensors:
                for item in items:
                    box = _box(item.storage_offsets, item.lengths)
                    key = item.storage_index.fqn
                    values = tensors.get_slice(key)[box] if box else tensors.get_tensor(key)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(values)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            with safe_open(self.folder / file, "pt") as tensors:
                yield tensors
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file}: missing or damaged ({error}): use another one") from None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Makes DCP's collectives in the block raise the error of the first rank that failed, on all ranks. Their own error
    is no `Exception`, and whoever goes on without a checkpoint would not notice it."""
    try:
        yield
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def keys_of(tensors: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested mappings, each with its key: the names on the way to it, joined with dots as in DCP."""
    for name, value in tensors.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
