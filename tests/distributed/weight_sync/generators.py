"""Receiving ends without a model: tensors by name, and a thread that answers as a generator's process does."""

import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from automodel_rl import Engine, ModelConfig, ModelHandle, OptimizerConfig, ParallelConfig, pack, sft_loss
from automodel_rl.config import WeightSyncConfig
from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Message
from automodel_rl.generators.child_process import ChildProcess
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import local_box, local_tensor
from automodel_rl.weight_sync.collective import CollectiveTransport
from automodel_rl.weight_sync.generator_end import GeneratorEnd
from automodel_rl.weight_sync.ipc import IpcTransport
from automodel_rl.weight_sync.local import LocalTransport
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.transport import Transport
from tests.tiny import make_sequences

CPU = torch.device("cpu")


class ThreadGenerator:
    """Both ends of a channel: this rank's, and a generator's in a thread."""

    def __init__(self, receiver: Receiver, device: torch.device = CPU):
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.outbox: queue.Queue[Message] = queue.Queue()
        self.gone = False
        self.end = GeneratorEnd(receiver, device, self.inbox, self.outbox.put)
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: Message) -> None:
        self.ready()
        self.inbox.put(message)

    def ready(self) -> bool:
        if not self.outbox.empty():
            return True
        if self.gone:
            raise WeightSyncError("the generator is gone")
        return False

    def receive(self) -> Message:
        return self.outbox.get(timeout=1)

    def _run(self) -> None:
        while not self.gone:
            try:
                self.end.handle(self.inbox.get())
            except SystemExit:  # a test has the generator die
                self.gone = True


def empty_homes(folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> dict[str, Tensor]:
    """A tensor of the sync's dtype for every tensor of a checkpoint, full of nonsense."""
    homes = {}
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            whole = tensors.get_tensor(name)
            kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
            homes[name] = torch.full(whole.shape, -77.0, dtype=kept, device=device)
    return homes


def receiving_process(
    folder: Path, kind: str = "sound", device: str = "cpu", visible: str | None = None
) -> GeneratorProcess:
    """A generator's process that only takes weights; see receiving.py."""
    command = [sys.executable, "-m", "tests.distributed.weight_sync.receiving", str(folder), kind, device]
    environment = None if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    process = GeneratorProcess(ChildProcess(command, environment), None)
    process.start()
    return process


def make_transport(kind: str, receiver: Receiver, handle: ModelHandle, seconds: float) -> tuple[Transport, Any]:
    device = handle.layout.device
    if kind == "local":
        return LocalTransport(receiver, device), None
    generator = ThreadGenerator(receiver)
    if kind == "ipc":
        return IpcTransport(generator, device, seconds), generator
    return CollectiveTransport(generator, handle, seconds), generator


def trained_model(
    folder: Path,
    parallel: dict[str, Any],
    dtype: str = "float32",
    lora: dict[str, Any] | None = None,
    lr: float = 1e-2,
) -> tuple[ModelHandle, Engine]:
    """A model whose weights are no longer the checkpoint's."""
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype, "lora": lora})
    handle = ModelHandle.from_pretrained(model, ParallelConfig.model_validate(parallel))
    engine = Engine(handle, OptimizerConfig(lr=lr, decay="constant"))
    train(handle, engine, seed=0)
    return handle, engine


def train(handle: ModelHandle, engine: Engine, seed: int) -> None:
    layout = handle.layout
    sequences = make_sequences(8, seed)
    microbatches = pack(sequences, 64, share=layout.data_share)
    engine.train_step(microbatches, sft_loss)


def put_together(parameter: Tensor, layout: Layout) -> Tensor:
    """The whole of a parameter from the pieces of all ranks of its stage. Not by DTensor's own `full_tensor`, which may
    ask for a process group of an earlier test."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    own = local_box(parameter), local_tensor(parameter.detach()).cpu()
    for box, piece in gather_objects(own, layout.stage_control):
        whole[box] = piece
    return whole.to(layout.device)


def own_tensors(handle: ModelHandle, dtype: torch.dtype) -> dict[str, Tensor]:
    """This rank's stages by the checkpoint's names, put together one by one, and cast after that."""
    names = handle.family.file_names.experts
    whole: dict[str, Tensor] = {}
    for name, parameter in handle.named_parameters():
        whole[name] = put_together(parameter, handle.layout).to(dtype)
    for part in handle.parts:
        stored = part.state_dict().keys()
        whole |= {name: buffer for name, buffer in part.named_buffers() if name in stored}
    if names is None:
        return whole
    split: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        renamed = name.replace(".mlp.", f".{names.block}.")
        if not renamed.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            split[renamed] = tensor
            continue
        block, _, kind = renamed.rpartition(".")
        for expert, matrix in enumerate(tensor):
            parts = {names.down: matrix}
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                parts = {names.gate: gate, names.up: up}
            split |= {f"{block}.{expert}.{part}.weight": value for part, value in parts.items()}
    return split


def sync_config(**values: Any) -> WeightSyncConfig:
    """With buffers so small that they matter for tiny models."""
    return WeightSyncConfig.model_validate({"buffer_mib": 5000 / 2**20, "timeout": 30.0, **values})
