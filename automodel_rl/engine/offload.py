"""Offloading: tensors wait on the host while their device memory is used for something else."""

from collections.abc import Iterable

import torch
from torch import Tensor

from automodel_rl.parallel.sharding import local_tensor


class Offloaded:
    """Moves the storage of tensors to the host, in place; they must not be used until `restore`.

    Args:
        tensors: whole or sharded; only this rank's shard moves. They come back bit for bit.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]):
        storages = {}
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            storages[storage.data_ptr()] = storage  # tensors may share one
        self._waiting = [(storage, _on_host(storage)) for storage in storages.values()]
        for storage, _ in self._waiting:
            storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Brings all tensors back. If memory runs out it raises and brings back none, and can be called again."""
        try:
            for storage, host in self._waiting:
                storage.resize_(host.numel())
                _as_bytes(storage).copy_(host, non_blocking=True)
        except BaseException:
            for storage, _ in self._waiting:
                storage.resize_(0)
            raise


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return host.copy_(_as_bytes(storage))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
