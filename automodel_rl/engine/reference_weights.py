"""The weights from which training started, for the reference policy."""

import contextlib
from collections.abc import Iterator

import torch

from automodel_rl.hf.read import persistent_tensors
from automodel_rl.lora.layers import without_adapters
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor


class ReferenceWeights:
    """A copy on the host of the weights that a model was loaded with, of all its parts.

    If adapters are trained, there is no copy: the reference is the model without them.

    Args:
        handle: the model.

    Raises:
        RuntimeError: weights have changed since the model was loaded, by training or by a checkpoint.
    """

    def __init__(self, handle: ModelHandle):
        if handle.has_changed and handle.model.lora is None:
            raise RuntimeError("ReferenceWeights are the first weights: make them before a step or a resume")
        self.handle = handle
        self._shards: list[torch.Tensor] = []
        if handle.model.lora is None:
            self._shards = [local_tensor(t.detach()) for part in handle.parts for _, t in persistent_tensors(part)]
        self._copies = [_on_host(shard) for shard in self._shards]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the reference weights for this block. After it the model has its own again, bit for bit."""
        if self.handle.model.lora is not None:
            with without_adapters(self.handle.parts):
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

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


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.to("cpu", copy=True)
    return copy.pin_memory() if tensor.is_cuda else copy
