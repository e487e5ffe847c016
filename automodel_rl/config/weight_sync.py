"""Weight sync: how trained weights reach the generators."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Positive, Section

Transport = Literal["local", "ipc", "collective", "vllm"]


class WeightSyncConfig(Section):
    transport: Transport | Literal["auto"] = "auto"
    """How weights are sent. local: to a generator in this process. ipc: to a generator's process on the same device,
    which reads the trainer's buffers in place. collective: one rank of each stage broadcasts to all generators, over
    NCCL, or over gloo on the CPU. vllm: vLLM's own weight transfer, over IPC on the same device and over NCCL to other
    devices. auto: the one that fits the generator's place."""

    buffer_mib: Annotated[float, Field(gt=0)] = 256.0
    """Size of a buffer in MiB. Buffers stay allocated between weight syncs. A larger tensor is sent in several buffers;
    for vllm, the buffers are made as large as the largest tensor."""

    num_buffers: Positive = 4
    """Number of buffers, which are used in turn, each on a stream of its own: one is filled while another is being
    sent."""

    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = None
    """Precision in which weights are sent and the generator computes; null takes model.dtype. Shards are cast before
    they are gathered."""

    adapters: Literal["merged", "alone"] = "merged"
    """What is sent with model.lora. merged: whole weights, to which the adapters are added in float32. alone: only the
    adapters, which the generator applies as the trainer does."""

    checksum: bool = False
    """Compare every tensor of the generator with what the trainer sent, after every weight sync."""

    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Most seconds that the trainer or a generator waits for the other at any point of a weight sync. After that the
    generator is started again; servers are only connected to again."""
