"""How trained weights reach the generators."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Positive, Section

Transport = Literal["local", "ipc", "collective", "vllm"]


class WeightSyncConfig(Section):
    transport: Transport | Literal["auto"] = "auto"
    """local: to a generator in this process. ipc: to a generator's process on the same device, which reads the buffers
    where they are. collective: the owners of each stage broadcast to all generators, over NCCL, or gloo on the CPU.
    vllm: its own weight transfer, over IPC on the same device and NCCL to others. auto: the one that fits the
    generator's place."""

    buffer_mib: Annotated[float, Field(gt=0)] = 256.0
    """Size of a buffer in MiB; they stay allocated between syncs. A tensor that is larger takes several, but for
    vllm, which gets one as large as it."""

    num_buffers: Positive = 4
    """Buffers in turn, each on a stream of its own: one is filled while another one is on its way."""

    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """In which weights are sent, and the generator computes; null is model.dtype. Shards are cast before they are
    gathered."""

    adapters: Literal["merged", "alone"] = "merged"
    """With model.lora. merged: whole weights, with the adapters added in fp32. alone: only the adapters, which the
    generator applies as the trainer does."""

    checksum: bool = False
    """Compares every tensor of the generator, after every sync, with what the trainer packed."""

    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds for which a side waits for the other at any one point; then the generator is given up and made anew, but
    for servers, which are only connected to again."""
