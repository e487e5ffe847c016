"""The initial weights, for the reference policy."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from automodel_rl.hf.read import stored_buffers
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor

SPARE = 0.1
"""Share of device memory that the copy leaves free, for later steps with more tokens than the first."""


class ReferenceWeights:
    """A copy of the trained weights as they were loaded, for all parts of a model. Frozen weights are not copied.

    `memory.reference` sets where the copy is kept: on the host in the master dtype, or on the device in the compute
    dtype, which gives the same results. `auto` moves it from the host to the device after the first step, when peak
    memory is known, if there is room. If adapters are trained, only they are copied, so that earlier training of
    loaded adapters is part of the reference.

    Args:
        lends_memory: whether generators use device memory in turn with the model. Memory that is free while they
            sleep is theirs, so `auto` keeps the copy on the host.

    Raises:
        RuntimeError: training or a checkpoint has changed the weights since they were loaded.
    """

    def __init__(self, handle: ModelHandle, *, lends_memory: bool = False):
        if handle.has_changed:
            raise RuntimeError("ReferenceWeights are the first weights: create them before a step or a resume")
        self.handle, self.lends_memory = handle, lends_memory
        every = [parameter for part in handle.parts for parameter in part.parameters()]
        trained = [parameter for parameter in every if parameter.requires_grad]
        # Buffers are router biases. Parameters are cast before use, buffers are not.
        buffers = [buffer for part in handle.parts for _, buffer in stored_buffers(part)]
        self._shards = [local_tensor(tensor.detach()) for tensor in (*trained, *buffers)]
        self._dtypes = [handle.dtype] * len(trained) + [buffer.dtype for buffer in buffers]
        self.is_on_device = handle.memory.reference == "device"
        self._copies = self._on_device(self._shards) if self.is_on_device else [_on_host(s) for s in self._shards]
        self._uses = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the reference weights inside the block, and restores its own bit for bit afterwards.

        A model on the host is brought to the device, with its own weights only after the block.
        """
        if self._uses == 1 and self._fits_on_device():
            self._copies, self.is_on_device = self._on_device(self._copies), True
        self._uses += 1
        if self.handle.is_on_host:
            with self.handle.to_device_after(self._shards):
                _copy(self._copies, self._shards)
                yield
            return
        if self.is_on_device:
            with self._copied_over():
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _on_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors to the device, in the compute dtypes."""
        device = self.handle.layout.device
        return [tensor.to(device, dtype, copy=True) for tensor, dtype in zip(tensors, self._dtypes, strict=True)]

    def _fits_on_device(self) -> bool:
        """Returns whether the copy may move to the device and fits beside a step's memory."""
        device = self.handle.layout.device
        if device.type != "cuda" or self.handle.memory.reference != "auto" or self.lends_memory:
            return False
        needed = sum(copy.numel() * dtype.itemsize for copy, dtype in zip(self._copies, self._dtypes, strict=True))
        free, total = torch.cuda.mem_get_info(device)
        return needed + SPARE * total < free

    @contextlib.contextmanager
    def _copied_over(self) -> Iterator[None]:
        """Overwrites the model's weights inside the block, keeping them on the device: no more memory than gradients
        need later."""
        self.handle.wait_for_readers()
        own = [shard.clone() for shard in self._shards]
        try:
            _copy(self._copies, self._shards)
            yield
        finally:
            _copy(own, self._shards)

    @torch.no_grad()
    def _swap(self) -> None:
        """Swaps the model's weights and the copies tensor by tensor, to never hold more than two sets."""
        self.handle.wait_for_readers()
        for shard, copy in zip(self._shards, self._copies, strict=True):
            current = shard.clone()
            shard.copy_(copy, non_blocking=True)
            copy.copy_(current, non_blocking=True)
        if self.handle.layout.device.type == "cuda":
            torch.cuda.synchronize(self.handle.layout.device)


@torch.no_grad()
def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.to("cpu", copy=True)
    return copy.pin_memory() if tensor.is_cuda else copy
