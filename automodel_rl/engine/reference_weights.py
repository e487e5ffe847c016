"""The weights from which training started, for the reference policy."""

import contextlib
from collections.abc import Iterator

import torch

from automodel_rl.hf.read import stored_buffers
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor

SPARE = 0.1
"""Share of a device's memory that the copy leaves free, for later steps with more tokens than the first."""


class ReferenceWeights:
    """A copy of the trained weights that a model was loaded with, of all its parts. Frozen weights stay as they are.

    The copy lies on the host at first. After the first step, whose peak of memory is known then, it moves to the device
    in the compute dtype if there is room; the model computes the same with it. If adapters are trained, only they are
    copied, so that adapters that had been trained before are part of the reference.

    Args:
        handle: the model.

    Raises:
        RuntimeError: weights have changed since the model was loaded, by training or by a checkpoint.
    """

    def __init__(self, handle: ModelHandle):
        if handle.has_changed:
            raise RuntimeError("ReferenceWeights are the first weights: make them before a step or a resume")
        self.handle = handle
        every = [parameter for part in handle.parts for parameter in part.parameters()]
        trained = [parameter for parameter in every if parameter.requires_grad]
        # Buffers are biases of routers. Parameters are cast before they are used, buffers are not.
        buffers = [buffer for part in handle.parts for _, buffer in stored_buffers(part)]
        self._shards = [local_tensor(tensor.detach()) for tensor in (*trained, *buffers)]
        self._dtypes = [handle.dtype] * len(trained) + [buffer.dtype for buffer in buffers]
        self._copies = [_on_host(shard) for shard in self._shards]
        self._uses = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the reference weights for this block. After it the model has its own again, bit for bit."""
        if self._uses == 1 and self._fits_on_device():
            device = self.handle.layout.device
            self._copies = [copy.to(device, dtype) for copy, dtype in zip(self._copies, self._dtypes, strict=True)]
        self._uses += 1
        if self.is_on_device:
            with self._copied_over():
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @property
    def is_on_device(self) -> bool:
        """Whether the copy lies on a GPU."""
        return any(copy.is_cuda for copy in self._copies)

    def _fits_on_device(self) -> bool:
        """Whether the device has room for the copy beside all that was reserved at the peak of a step."""
        device = self.handle.layout.device
        if device.type != "cuda" or self.handle.memory.offload is not None:  # generators have the device in between
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
        target.copy_(source)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.to("cpu", copy=True)
    return copy.pin_memory() if tensor.is_cuda else copy
