"""Sends the published weights of a run to a generator that has joined it. The trainer takes no part."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_rl.compat.operations import copy_each
from automodel_rl.errors import WeightSyncError
from automodel_rl.hf.buckets import Bucket, Chunk, Plan, TensorSpec
from automodel_rl.weight_sync.published import PublishedWeights
from automodel_rl.weight_sync.slots import Slot, Slots
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.version_files import VersionFiles

NUM_BUFFERS = 2


@dataclass(frozen=True)
class VersionLoad:
    """Cost of bringing a generator to a version.

    Attributes:
        num_bytes: bytes read, compressed.
        read_seconds: to read, decompress and verify them.
        send_seconds: to send all weights to the generator.
    """

    num_bytes: int
    read_seconds: float
    send_seconds: float


class PublishedSync:
    """Brings a generator's process to published versions, and keeps the weights in host memory in between.

    Args:
        max_bytes: size of a buffer, unless a tensor is larger.

    Attributes:
        plan: set by `load_version`.
        transport: set by `connect`.
    """

    def __init__(self, files: VersionFiles, max_bytes: int):
        self.files, self.max_bytes = files, max_bytes
        self.plan: Plan
        self.transport: Transport
        self._weights, self._tensors = PublishedWeights(files), dict[str, Tensor]()
        self._slots: Slots | None = None

    def read_ahead(self, version: int, digest: str) -> None:
        """Reads the version with this hash, so that a later `load_version` reads only what has changed since.

        Raises:
            InputError: the version cannot be read, or is not the run's.
        """
        self._weights.load_version(self._tensors, version, digest)

    def connect(self, transport: Transport) -> None:
        self.transport = transport

    def load_version(self, version: int, digest: str, number: int) -> VersionLoad:
        """Sends the version with this hash to the generator, as weight sync `number`. Running completions continue
        with it.

        Raises:
            InputError: the version is missing or damaged.
            WeightSyncError: the generator did not take it.
        """
        started = time.perf_counter()
        self._weights.load_version(self._tensors, version, digest)
        read = time.perf_counter()
        if self._slots is None:
            self.plan = plan_of(self._tensors, self.max_bytes)
            self._slots = self.transport.connect([self.plan], self.plan.largest_bucket, NUM_BUFFERS)
        self.transport.begin(number, frozen=True)
        turns = [(0, number) for number in range(len(self.plan.buckets))]
        self.transport.send_all(self._slots, turns, self._fill)
        committed = self.transport.commit(number, sums=False)
        if committed.version != number:
            raise WeightSyncError(f"the generator reports version {committed.version} instead of {number}")
        return VersionLoad(self._weights.num_bytes, read - started, time.perf_counter() - read)

    @torch.no_grad()
    def _fill(self, sender: int, number: int, slot: Slot) -> None:
        bucket = self.plan.buckets[number]
        elements = bucket.elements(slot.buffer)
        names = [self.plan.tensors[chunk.tensor].name for chunk in bucket.chunks]
        places = [elements[chunk.offset : chunk.offset + chunk.count] for chunk in bucket.chunks]
        copy_each(places, [self._tensors[name].view(-1).to(slot.buffer.device) for name in names])


def plan_of(tensors: Mapping[str, Tensor], max_bytes: int) -> Plan:
    """Returns a plan of whole tensors in buckets of at most `max_bytes`, unless a tensor is larger."""
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    buckets: list[Bucket] = []
    chunks: list[Chunk] = []
    numel = 0
    for place, spec in enumerate(specs):
        is_other = bool(chunks) and specs[chunks[0].tensor].dtype != spec.dtype
        if chunks and (is_other or (numel + spec.numel) * spec.dtype.itemsize > max_bytes):
            buckets.append(Bucket(specs[chunks[0].tensor].dtype, numel, tuple(chunks)))
            chunks, numel = [], 0
        chunks.append(Chunk(place, 0, spec.numel, numel))
        numel += spec.numel
    if chunks:
        buckets.append(Bucket(specs[chunks[0].tensor].dtype, numel, tuple(chunks)))
    return Plan(specs, tuple(buckets))
