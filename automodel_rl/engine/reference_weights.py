"""The weights from which training started, for the reference policy."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from automodel_rl.hf.read import stored_buffers
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor

SPARE = 0.1
"""Share of a device's memory that the copy leaves free, for later steps with more tokens than the first."""


class ReferenceWeights:
    """A copy of the trained weights that a model was loaded with, of all its parts. Frozen weights stay as they are.

    `memory.reference` says where the copy lies. On the host it has the master dtype. On the device it has the compute
    dtype, with which the model computes the same. With `auto` it moves from the host to the device after the first
    step, whose peak of memory is known then, if there is room. If adapters are trained, only they are copied, so that
    adapters that had been trained before are part of the reference.

    Args:
        handle: the model.
        lends_memory: whether generators have memory of the device in turns with the model. What is free while they
            sleep is theirs, so `auto` leaves the copy on the host.

    Raises:
        RuntimeError: weights have changed since the model was loaded, by training or by a checkpoint.

    Attributes:
        is_on_device: whether the copy lies on the device.
    """

    def __init__(self, handle: ModelHandle, *, lends_memory: bool = False):
        if handle.has_changed:
            raise RuntimeError("ReferenceWeights are the first weights: make them before a step or a resume")
        self.handle, self.lends_memory = handle, lends_memory
        every = [parameter for part in handle.parts for parameter in part.parameters()]
        trained = [parameter for parameter in every if parameter.requires_grad]
        # Buffers are biases of routers. Parameters are cast before they are used, buffers are not.
        buffers = [buffer for part in handle.parts for _, buffer in stored_buffers(part)]
        self._shards = [local_tensor(tensor.detach()) for tensor in (*trained, *buffers)]
        self._dtypes = [handle.dtype] * len(trained) + [buffer.dtype for buffer in buffers]
        self.is_on_device = handle.memory.reference == "device"
        self._copies = self._on_device(self._shards) if self.is_on_device else [_on_host(s) for s in self._shards]
        self._uses = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the reference weights for this block. After it the model has its own again, bit for bit.

        If the model is on the host it comes to the device, and its own weights do so only after the block.
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
        """Copies on the device, in the dtypes in which the model computes."""
        device = self.handle.layout.device
        return [tensor.to(device, dtype, copy=True) for tensor, dtype in zip(tensors, self._dtypes, strict=True)]

    def _fits_on_device(self) -> bool:
        """Whether the copy may move to the device, and has room there beside all that a step had reserved."""
        device = self.handle.layout.device
        if device.type != "cuda" or self.handle.memory.reference != "auto" or self.lends_memory:
            return False
        needed = sum(copy.numel() * dtype.itemsize for copy, dtype in zip(self._copies, self._dtypes, strict=True))
        free, total = torch.cuda.mem_get_info(device)
        return needed + SPARE * total < free

    @contextlib.contextmanager
    def _copied_over(self) -> Iterator[None]:
        """The reference weights in place of the model's, which are kept on the device meanwhile: no more memory than
        gradients take later in the step."""
        self.handle.before_change()
        own = [shard.clone() for shard in self._shards]
        try:
            _copy(self._copies, self._shards)
            yield
        finally:
            _copy(own, self._shards)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges the model's weights and the copies, tensor by tensor, so there are never more than two sets."""
        self.handle.before_change()
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
