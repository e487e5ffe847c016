"""WeightSync: sends the model to this rank's generator. Start reading the package here."""

import functools
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from automodel_rl.config import WeightSyncConfig
from automodel_rl.config.rollout import LARGEST_BUFFER
from automodel_rl.errors import WeightSyncError, reason
from automodel_rl.generator_messages import Committed
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.producer import Producer
from automodel_rl.weight_sync.slots import Slots
from automodel_rl.weight_sync.transport import Transport

T = TypeVar("T")

SMALLEST_BUFFER = 2**24
"""Smallest buffer of `auto`, in bytes."""

BUFFERS_SHARE = 0.05
"""Share of the GPU's free memory that all buffers together may take."""


class WeightSync:
    """Sends a model's weights to generators. Every rank of the job has one.

    A sync fills a ring of buffers: each rank casts its shards, and the ranks of a pipeline stage gather them bucket by
    bucket. The transport sends one bucket while the next is filled.

    Args:
        resends_frozen: resend frozen tensors in every sync, for generators that lose their weights in between,
            such as vLLM in deep sleep. Otherwise they are sent once per connection.

    Attributes:
        version: number of the last sync, from 1 on.
        seconds: its duration.
    """

    def __init__(
        self, handle: ModelHandle, transport: Transport, config: WeightSyncConfig, *, resends_frozen: bool = False
    ):
        self.handle, self.transport, self.config, self.resends_frozen = handle, transport, config, resends_frozen
        self.producer = Producer(
            handle,
            sync_dtype(config, handle),
            buffer_bytes(config, handle),
            whole=transport.whole,
            adapters_alone=config.adapters == "alone",
            reach=transport.reach,
        )
        self.slots: Slots | None = None
        self.version = 0
        self.seconds = 0.0
        self._problem = ""
        self._is_new = True  # equal on all ranks, so that they fill the same buckets

    @property
    def num_bytes(self) -> int:
        """Bytes that each generator receives in the first weight sync."""
        return sum(plan.num_bytes for plan in self.producer.plans)

    def send(self) -> None:
        """Sends the current weights. A collective of all ranks, even if it fails on some.

        Raises:
            WeightSyncError: this rank's generator does not have the new weights, and refuses to generate.
        """
        started = time.perf_counter()
        self.version += 1
        self._problem = ""
        frozen = self._is_new or self.resends_frozen
        if self.slots is None:
            self.slots = self._attempt(self._connect)
        self.producer.begin()
        # A rank whose transport has failed still fills buffers with the others, but sends nothing.
        slots = self.slots or self._connect_nothing()
        self._attempt(lambda: self.transport.begin(self.version, frozen=frozen))
        fill = functools.partial(self.producer.fill, sums=self.config.checksum)
        self.transport.send_all(slots, self.producer.turns(frozen), fill, self._attempt)
        committed = self._attempt(lambda: self.transport.commit(self.version, sums=self.config.checksum))
        self._check(committed)
        self._agree()
        self._is_new = False
        self.seconds = time.perf_counter() - started

    def disconnect(self) -> None:
        """Releases buffers and connections until the next sync."""
        self.transport.close()
        self.slots, self._is_new = None, True

    def reconnect(self, transport: Transport) -> None:
        """Uses another transport, of the same class, from now on."""
        self.disconnect()
        self.transport = transport

    def _connect(self) -> Slots:
        size = max(1, self.producer.largest_bucket)
        return self.transport.connect(self.producer.plans, size, self.config.num_buffers)

    def _connect_nothing(self) -> Slots:
        """Allocates a buffer only to take part in the gathering."""
        size, device = max(1, self.producer.largest_bucket), self.handle.layout.device
        return Slots.allocate(size, 1, device)

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Calls `work` unless this sync has already failed."""
        if self._problem:
            return None
        try:
            return work()
        except Exception as error:
            self._problem = reason(error)
        self.transport.abort()
        return None

    def _check(self, committed: Committed | None) -> None:
        expected = self.producer.checksums() if self.config.checksum else {}
        if committed is None:
            return
        if committed.version != self.version:
            self._problem = f"the generator reports version {committed.version} after weight sync {self.version}"
        elif self.config.checksum:
            found = committed.checksums or {}
            wrong = [name for name in expected if found.get(name) != expected[name]]
            if wrong:
                self._problem = (
                    f"weight_sync.checksum: {len(wrong)} tensors differ in the generator, the first {wrong[0]}"
                )

    def _agree(self) -> None:
        """Makes all ranks reconnect if the sync failed on any: links may still hold parts of it."""
        problems = gather_objects(self._problem, self.handle.layout.world_control)
        if any(problems):
            self.transport.abort()
            self.slots, self._is_new = None, True
        if self._problem:
            raise WeightSyncError(self._problem)


def buffer_bytes(config: WeightSyncConfig, handle: ModelHandle) -> int:
    """Returns the size of a buffer, equal on all ranks. A collective of all ranks."""
    if config.buffer_mib != "auto":
        return int(config.buffer_mib * 2**20)
    own, device = LARGEST_BUFFER, handle.layout.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        own = min(own, int(BUFFERS_SHARE * free) // config.num_buffers)
    return max(SMALLEST_BUFFER, min(gather_objects(own, handle.layout.world_control)))


def sync_dtype(config: WeightSyncConfig, handle: ModelHandle) -> torch.dtype:
    """Returns the dtype of sent weights, in which generators compute."""
    return handle.dtype if config.dtype is None else getattr(torch, config.dtype)
