"""Weights for generators without a trainer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Bucket, Chunk, Plan, TensorSpec
from automodel_rl.weight_sync.channel import Channel, call, send_call
from automodel_rl.weight_sync.receiver import Receiver


def plan_of(tensors: Mapping[str, Tensor]) -> Plan:
    """A bucket for each tensor."""
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    return Plan(
        specs,
        tuple(
            Bucket(tensor.dtype, tensor.numel(), (Chunk(number, 0, tensor.numel(), 0),))
            for number, tensor in enumerate(tensors.values())
        ),
    )


def receive(receiver: Receiver, tensors: Mapping[str, Tensor], version: int = 1) -> None:
    """Does a whole weight sync."""
    receiver.agree([plan_of(tensors)])
    receiver.begin()
    for number, tensor in enumerate(tensors.values()):
        receiver.load(0, number, tensor.detach().contiguous().view(-1).view(torch.uint8))
    receiver.commit(version)


def send_weights(channel: Channel, version: int, *names: str) -> Committed:
    """Does a whole weight sync of vLLM, in one bucket."""
    send_call(channel, "begin", version, 5.0)
    call(channel, "load_weights", {"names": list(names)}, seconds=5.0)
    return call(channel, "commit", False, seconds=5.0)
