"""A second set of weights on the host that can take the model's place, for the reference policy."""

import contextlib
from collections.abc import Iterator

import torch

from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor


class ReferenceWeights:
    """The weights that a handle has now, kept once on the host, every part's.

    Args:
        handle: the model.
    """

    def __init__(self, handle: ModelHandle):
        self.handle = handle
        self._shards = [local_tensor(p.detach()) for part in handle.parts for p in part.parameters()]
        self._copies = [_on_host(shard) for shard in self._shards]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block the model has the reference weights; after it, bit for bit those it had before."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges both sets, tensor by tensor, so that there are never more than two."""
        for shard, copy in zip(self._shards, self._copies, strict=True):
            current = shard.clone()
            shard.copy_(copy, non_blocking=True)
            copy.copy_(current)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.to("cpu", copy=True)
    return copy.pin_memory() if tensor.is_cuda else copy
