"""A weight transfer for vLLM from a process on the same device: tensors in packed buffers, opened by CUDA IPC handles.

vLLM loads this file by its extension point for weight transfers; like the worker, it imports nothing of this package.
vLLM's own IPC backend does the same, but needs ray and answers before its copies are made. Checked with vLLM 0.23.0.
"""

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

DEVICE_ARGUMENT = 6
"""Place of the device's number among the arguments of rebuild_cuda_tensor. It differs between processes."""


@dataclass
class SameDeviceInit(WeightTransferInitInfo):
    """The arguments of rebuild_cuda_tensor for each buffer of each worker."""

    buffers: list[list[tuple[Any, ...]]]


@dataclass
class SameDeviceUpdate(WeightTransferUpdateInfo):
    """The contents of a filled buffer: its number, and the tensors in it, back to back and all of one dtype."""

    buffer: int
    names: list[str]
    shapes: list[list[int]]
    dtype_names: list[str]


class SameDeviceEngine(WeightTransferEngine[SameDeviceInit, SameDeviceUpdate]):
    """Loads weights from filled buffers."""

    init_info_cls = SameDeviceInit
    update_info_cls = SameDeviceUpdate
    buffers: list[torch.Tensor]

    def init_transfer_engine(self, init_info: SameDeviceInit) -> None:
        device = torch.accelerator.current_device_index()
        self.buffers = []
        for arguments in init_info.buffers[self.parallel_config.rank]:
            here = [*arguments]
            here[DEVICE_ARGUMENT] = device
            self.buffers.append(rebuild_cuda_tensor(*here))

    def receive_weights(
        self, update_info: SameDeviceUpdate, load_weights: Callable[[list[tuple[str, torch.Tensor]]], None]
    ) -> None:
        rest, tensors = self.buffers[update_info.buffer], []
        for name, shape, dtype in zip(update_info.names, update_info.shapes, update_info.dtype_names, strict=True):
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            size = like.numel() * like.element_size()
            # A copy: vLLM keeps what it gets until a layer is complete, and the buffer is soon filled anew.
            tensors.append((name, rest[:size].view(like.dtype).view(shape).clone()))
            rest = rest[size:]
        torch.cuda.current_stream().synchronize()
        load_weights(tensors)

    def shutdown(self) -> None:
        self.buffers = []

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer's side is automodel_rl.weight_sync.vllm")
