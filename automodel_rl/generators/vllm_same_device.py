"""Weight transfer into vLLM from a process on the same device: packed buffers, shared by CUDA IPC handles, or on a CPU
by files in shared memory.

vLLM loads this file through its extension point for weight transfers, so it imports nothing of this package. vLLM's
own IPC backend needs ray, and answers before its copies are complete.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm_versions import Weights, begin_reload, end_reload, load

DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of rebuild_cuda_tensor. Processes may number devices differently."""


@dataclass
class SameDeviceInit(WeightTransferInitInfo):
    """Arguments of rebuild_cuda_tensor, or the path of a file in shared memory, for each buffer of each worker."""

    buffers: list[list[tuple[Any, ...]]]


@dataclass
class SameDeviceUpdate(WeightTransferUpdateInfo):
    """A filled buffer: its index, and the tensors in it, contiguous and of one dtype."""

    buffer: int
    names: list[str]
    shapes: list[list[int]]
    dtype_names: list[str]


class SameDeviceEngine(WeightTransferEngine[SameDeviceInit, SameDeviceUpdate]):
    init_info_cls = SameDeviceInit
    update_info_cls = SameDeviceUpdate
    buffers: list[torch.Tensor]

    def init_transfer_engine(self, init_info: SameDeviceInit) -> None:
        self.buffers = [open_buffer(arguments) for arguments in init_info.buffers[self.parallel_config.rank]]

    def start_weight_update(self) -> None:
        begin_reload(self.model)

    def finish_weight_update(self) -> None:
        end_reload(self.model, self.model_config)

    def receive_weights(
        self, update_info: SameDeviceUpdate, load_weights: Callable[[Weights], None] | None = None
    ) -> None:
        rest, tensors = self.buffers[update_info.buffer], []
        for name, shape, dtype in zip(update_info.names, update_info.shapes, update_info.dtype_names, strict=True):
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            size = like.numel() * like.element_size()
            # A copy: vLLM keeps tensors until a layer is complete, and the buffer is reused before that.
            tensors.append((name, rest[:size].view(like.dtype).view(shape).clone()))
            rest = rest[size:]
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        load(tensors, self.model, load_weights)

    def shutdown(self) -> None:
        self.buffers = []

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer's side is automodel_rl.weight_sync.vllm")


def open_buffer(arguments: tuple[Any, ...]) -> torch.Tensor:
    """Opens a buffer, as uint8. A single argument is the path of a file."""
    if len(arguments) == 1:
        (file,) = arguments
        return torch.from_file(file, shared=True, size=os.path.getsize(file), dtype=torch.uint8)
    here = [*arguments]
    here[DEVICE_ARGUMENT] = torch.accelerator.current_device_index()
    return rebuild_cuda_tensor(*here)
