"""Storage of tensors by many ranks: a safetensors file for each rank, and one index in JSON.

torch's distributed checkpoint (DCP) plans what each rank writes and reads, also from one layout to another. Its own
formats use pickle, or build a rank's whole file in memory. The files here are written as a stream, and any program that
reads safetensors can read them.
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
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from automodel_rl.checkpoint.folder import INDEX, CheckpointError, read_json, write_hashed
from automodel_rl.errors import innermost
from automodel_rl.hf.stored import DTYPES
from automodel_rl.manifest import StoredFile
from automodel_rl.parallel.host_collectives import gather_to_first, scatter_from_first
from automodel_rl.parallel.sharding import Box

ALIGNMENT = 8
"""The header of a safetensors file is padded to a multiple of this many bytes."""


@dataclass(frozen=True)
class WritePlan:
    """What a rank writes. It is the same for every checkpoint of the same tensors on the same layout.

    Attributes:
        keys: keys of the tensors whose shards it writes.
        index: content of the index on rank 0; None on all others.
    """

    keys: list[str]
    index: str | None = None


def plan_writes(tensors: dict[str, Any], group: dist.ProcessGroup) -> WritePlan:
    """Plans which rank writes which shards, so that each is written once. A collective.

    DCP plans, and ranks send along a tree what each of them has. DCP's own collectives connect rank 0 with all others.

    Args:
        tensors: this rank's tensors, in nested mappings.
        group: a gloo group of all ranks.

    Raises:
        CheckpointError: on all ranks; they have different tensors of one key.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=group.rank() == 0)
    of_ranks = gather_to_first(planner.create_local_plan(), group)
    planned: list[WritePlan | str] | None = None
    if of_ranks is not None:
        try:
            planned = _plans(*planner.create_global_plan(of_ranks))
        except Exception as error:  # others wait for an answer
            planned = [innermost(error)] * group.size()
    plan = scatter_from_first(planned, group)
    if isinstance(plan, str):
        raise CheckpointError(plan)
    return plan


def _plans(of_ranks: list[SavePlan], metadata: Metadata) -> list[WritePlan | str]:
    """The plan of each rank, and the index with that of rank 0."""
    files = {item.index: rank_name(rank) for rank, plan in enumerate(of_ranks) for item in plan.items}
    index = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = [
            {"file": files[MetadataIndex(key, chunk.offsets)], "offsets": [*chunk.offsets], "shape": [*chunk.sizes]}
            for chunk in tensor.chunks
        ]
        index[key] = {"dtype": DTYPES[tensor.properties.dtype], "shape": [*tensor.size], "chunks": chunks}
    keys = [[item.index.fqn for item in plan.items] for plan in of_ranks]
    return [WritePlan(keys[0], json.dumps(index)), *map(WritePlan, keys[1:])]


def rank_name(rank: int) -> str:
    """Name of the file with a rank's shards."""
    return f"rank_{rank:05d}.safetensors"


def write_shards(folder: Path, rank: int, shards: dict[str, Tensor], plan: WritePlan) -> dict[str, StoredFile]:
    """Writes what a rank is to write, and returns its files by name.

    Args:
        folder: an existing folder.
        rank: the rank of this process.
        shards: this rank's shard of every tensor, by key, on any device.
        plan: what it is to write.
    """
    written = {}
    if plan.keys:
        tensors = [(key, shards[key]) for key in plan.keys]
        written[rank_name(rank)] = _write_file(folder / rank_name(rank), tensors)
    if plan.index is not None:
        written[INDEX] = write_hashed(folder / INDEX, plan.index)
    return written


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


class SafetensorsReader:
    """Reads the tensors that any number of ranks have written with `write_shards`. No rank needs another one for it.

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

    def read_into(self, tensors: dict[str, Any]) -> None:
        """Reads this rank's shards of tensors, in place: of each file what is to be read of it, and of no other file.

        Args:
            tensors: this rank's tensors, in nested mappings.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint has other tensors.
        """
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner(tensors, Metadata({**self._tensors}), is_coordinator=False)
            plan = planner.finish_plan(planner.create_local_plan())
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: has other tensors ({innermost(error)}): use another one") from None
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with self._open(file) as stored:
                for item in items:
                    box = _box(item.storage_offsets, item.lengths)
                    key = item.storage_index.fqn
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(stored.get_slice(key)[box] if box else stored.get_tensor(key))
                    planner.commit_tensor(item, target)

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            with safe_open(self.folder / file, "pt") as tensors:
                yield tensors
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file}: missing or damaged ({error}): use another one") from None


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def keys_of(tensors: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested mappings, each with its key: the names on the way to it, joined with dots as in DCP."""
    for name, value in tensors.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
