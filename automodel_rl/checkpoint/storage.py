"""Tensor storage for many ranks: one safetensors file per rank, and one JSON index.

Files are written as a stream, and readable by any program for safetensors. torch's distributed checkpoint (DCP)
stores the same shards, but its formats use pickle or build a rank's whole file in memory, and its plans connect rank
0 with all others, which takes a minute for 1,024 ranks (benchmarks/how_large.md).
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

from automodel_rl.checkpoint.folder import INDEX, CheckpointError, read_json, write_hashed
from automodel_rl.errors import describe_root_cause
from automodel_rl.hf.stored import DTYPES
from automodel_rl.manifest import StoredFile
from automodel_rl.parallel.host_collectives import gather_to_first, scatter_from_first
from automodel_rl.parallel.sharding import Box, local_box, local_tensor, overlap, relative

ALIGNMENT = 8
"""Multiple of bytes to which the header of a safetensors file is padded."""


@dataclass(frozen=True)
class WritePlan:
    """The shards that a rank writes, the same for every checkpoint of the same tensors on the same layout.

    Attributes:
        index: the index's contents on rank 0; None on all others.
    """

    keys: list[str]
    index: str | None = None


@dataclass(frozen=True)
class _Shard:
    """A shard held by a rank.

    Attributes:
        whole: the tensor's whole shape.
        offsets, shape: the shard's offsets in the tensor, and its shape.
    """

    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def plan_writes(tensors: dict[str, Any], group: dist.ProcessGroup) -> WritePlan:
    """Plans which rank writes which shards, each exactly once. A collective.

    Raises:
        CheckpointError: on all ranks, if shards do not cover a tensor.
    """
    own: list[_Shard] | str
    try:
        own = [_shard(key, tensor) for key, tensor in keys_of(tensors) if local_tensor(tensor).numel()]
    except Exception as error:  # the other ranks wait for this one
        own = describe_root_cause(error)
    of_ranks = gather_to_first(own, group)
    planned: list[WritePlan | str] | None = None
    if of_ranks is not None:
        try:
            planned = [*_plans(of_ranks)]
        except Exception as error:  # the other ranks wait for a result
            planned = [str(error) if isinstance(error, CheckpointError) else describe_root_cause(error)] * group.size()
    plan = scatter_from_first(planned, group)
    if isinstance(plan, str):
        raise CheckpointError(plan)
    return plan


def _shard(key: str, tensor: Tensor) -> _Shard:
    box, held = local_box(tensor), local_tensor(tensor)
    offsets = tuple(part.start for part in box)
    return _Shard(key, tuple(tensor.shape), offsets, tuple(held.shape), DTYPES[tensor.dtype], held.nbytes)


def _plans(of_ranks: list[list[_Shard] | str]) -> list[WritePlan]:
    """Returns each rank's plan, with the index in rank 0's. A shard is written by the holder with the least to write
    so far; shards with a single holder come first. Raises CheckpointError with a rank's problem."""
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    found: dict[tuple[str, tuple[int, ...]], _Shard] = {}
    for rank, shards in enumerate(of_ranks):
        if isinstance(shards, str):
            raise CheckpointError(f"rank {rank} cannot report what it holds: {shards}")
        for shard in shards:
            place = shard.key, shard.offsets
            holders.setdefault(place, []).append(rank)
            found.setdefault(place, shard)
    keys: list[list[str]] = [[] for _ in of_ranks]
    sizes = [0] * len(of_ranks)
    writers = {}
    for place in sorted(holders, key=lambda place: len(holders[place]) > 1):
        rank = writers[place] = min(holders[place], key=lambda rank: sizes[rank])
        sizes[rank] += found[place].num_bytes
        keys[rank].append(place[0])
    index: dict[str, dict[str, Any]] = {}
    for place, shard in found.items():
        of_key = index.setdefault(shard.key, {"dtype": shard.dtype, "shape": [*shard.whole], "chunks": []})
        chunk = {"file": rank_name(writers[place]), "offsets": [*shard.offsets], "shape": [*shard.shape]}
        of_key["chunks"].append(chunk)
    for key, of_key in index.items():
        if sum(math.prod(chunk["shape"]) for chunk in of_key["chunks"]) != math.prod(of_key["shape"]):
            raise CheckpointError(f"the shards of {key} do not make up its shape {of_key['shape']}")
    return [WritePlan(keys[0], json.dumps(index)), *map(WritePlan, keys[1:])]


def rank_name(rank: int) -> str:
    """Returns the name of the file with a rank's shards."""
    return f"rank_{rank:05d}.safetensors"


def write_shards(folder: Path, rank: int, shards: dict[str, Tensor], plan: WritePlan) -> dict[str, StoredFile]:
    """Writes the shards in a rank's plan to an existing folder, and returns the files by name. `shards` are this
    rank's, by key, on any device."""
    written = {}
    if plan.keys:
        tensors = [(key, shards[key]) for key in plan.keys]
        written[rank_name(rank)] = _write_file(folder / rank_name(rank), tensors)
    if plan.index is not None:
        written[INDEX] = write_hashed(folder / INDEX, plan.index)
    return written


def _write_file(path: Path, tensors: list[tuple[str, Tensor]]) -> StoredFile:
    """Writes a safetensors file to disk, tensor by tensor. Large writes let other threads run."""
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
    """Yields the bytes of every tensor, without copying those on the host.

    NumPy is not used: it would fix the size of a storage for good, and storages of offloaded moments shrink to 0
    later.
    """
    for _, tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            yield memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).cast("B")


@dataclass(frozen=True)
class _Stored:
    """A stored tensor: whole shape, dtype, and for each shard its box and file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[Box, str]]


class SafetensorsReader:
    """Reads tensors that any number of ranks have written with `write_shards`. Not a collective.

    Raises:
        CheckpointError: the index is damaged, or names files outside the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._index: dict[str, dict[str, Any]] = read_json(folder / INDEX)
            self.shapes = {key: _shape_of(key, of) for key, of in self._index.items()}
            for file in {chunk["file"] for of in self._index.values() for chunk in of["chunks"]}:
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is not a file of the folder")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder / INDEX}: damaged ({type(error).__name__}: {error})") from None

    def read(self, key: str) -> Tensor:
        """Reads a whole tensor, on the host."""
        stored = self._stored(key)
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for box, file in stored.chunks:
            with self._open(file) as tensors:
                whole[box] = tensors.get_tensor(key)
        return whole

    def read_into(self, tensors: dict[str, Any]) -> None:
        """Reads this rank's shards of tensors in place, from only the needed parts of the needed files.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint has other tensors.
        """
        by_file: dict[str, list[tuple[str, Box, Tensor]]] = {}
        for key, tensor in keys_of(tensors):
            if self.shapes.get(key) != tensor.shape:
                has = [*self.shapes[key]] if key in self.shapes else "none"
                raise CheckpointError(f"{self.folder}: expected {key} of shape {[*tensor.shape]}, found {has}")
            held, own = local_tensor(tensor).detach(), local_box(tensor)
            for box, file in self._stored(key).chunks if held.numel() else ():
                met = overlap(own, box)
                if met is not None:
                    by_file.setdefault(file, []).append((key, relative(met, box), held[relative(met, own)]))
        for file, parts in by_file.items():
            with self._open(file) as stored:
                for key, part, target in parts:
                    target.copy_(stored.get_slice(key)[part] if part else stored.get_tensor(key))

    def _stored(self, key: str) -> _Stored:
        of = self._index[key]
        dtype = next(dtype for dtype, name in DTYPES.items() if name == of["dtype"])
        chunks = [(_box(chunk["offsets"], chunk["shape"]), chunk["file"]) for chunk in of["chunks"]]
        return _Stored(self.shapes[key], dtype, chunks)

    @contextlib.contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            with safe_open(self.folder / file, "pt") as tensors:
                yield tensors
        except (SafetensorError, OSError, RuntimeError, IndexError, ValueError) as error:
            raise CheckpointError(f"{self.folder / file}: missing or damaged ({error}): use another one") from None


def _shape_of(key: str, of: dict[str, Any]) -> torch.Size:
    """Returns a tensor's whole shape, after checking that its shards cover it."""
    shape = torch.Size(of["shape"])
    if sum(math.prod(chunk["shape"]) for chunk in of["chunks"]) != math.prod(shape):
        raise ValueError(f"the shards of {key} do not make up its shape {[*shape]}")
    if of["dtype"] not in DTYPES.values() or any(len(chunk["offsets"]) != len(shape) for chunk in of["chunks"]):
        raise ValueError(f"{key} has an unknown dtype or shape")
    return shape


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def keys_of(tensors: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested mappings with their keys: the nested names joined with dots."""
    for name, value in tensors.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
