"""The trained weights for an engine: whole tensors by Hugging Face name, of all stages, on every rank."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.model.handle import ModelHandle


def whole_weights(handle: ModelHandle) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model on every rank, one after the other. A collective: all ranks read to the end."""
    layout = handle.layout
    for sender in range(layout.parallel.pp):
        own = handle.named_hf_tensors() if layout.pp_rank == sender else iter(())
        while True:
            name, tensor = next(own, (None, None))
            if layout.parallel.pp > 1:
                kind = [None if name is None or tensor is None else (name, tensor.shape, tensor.dtype)]
                dist.broadcast_object_list(kind, group=layout.pp_control, group_src=sender)
                if kind[0] is not None:
                    name, shape, dtype = kind[0]
                    if tensor is None:
                        tensor = torch.empty(shape, dtype=dtype, device=layout.device)
                    tensor = tensor.contiguous()
                    dist.broadcast(tensor, group=layout.pp_group, group_src=sender)
            if name is None or tensor is None:
                break
            yield name, tensor
