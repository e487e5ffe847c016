"""The time of a step on a layout, estimated from matrix products, attention, messages and the pipeline's bubble.

It ranks layouts; it does not replace a measurement. Efficiencies are those measured on one H200 (benchmarks/README.md):
51% to 55% of the peak for a dense model of 1.5B, 32% for a mixture of 3.2B. Messages count with the bandwidth of the
link that their group spans: NVLink within a host, the network between hosts.
"""

import math
from dataclasses import dataclass

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.support.description import experts_per_token
from automodel_rl.tools.plan.devices import Device

EFFICIENCY = {"dense": 0.52, "mixture": 0.32}
"""Share of a device's peak that matrix products reach, by kind of model."""

RECOMPUTED = {"none": 1.0, "selective": 1.06, "full": 4 / 3}
"""Work of a step with recomputation, in units of a forward and a backward without it."""

NETWORK_GB_PER_S = 50.0
"""Bandwidth between hosts for each GPU: 400 Gbit/s."""

PCIE_GB_PER_S = 50.0
"""Bandwidth to the host's memory, for moments that are kept there."""

GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Work:
    """The work of a step.

    Attributes:
        num_tokens: tokens of the global batch.
        attention: FLOPs of attention for each token, forward and backward.
    """

    num_tokens: float
    attention: float = 0.0


def step_seconds(
    model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, work: Work, bubble: float, device: Device
) -> float:
    """The estimated time of a training step.

    Args:
        model: the model.
        parallel: the layout.
        memory: what is recomputed or offloaded.
        work: tokens of the global batch, and the work of attention.
        bubble: share of the ranks' time that the pipeline's schedule leaves idle.
        device: the card.
    """
    kind = "mixture" if model.active_parameters < 0.9 * model.parameters else "dense"
    flops = (6 * model.active_parameters + work.attention) * work.num_tokens
    flops *= RECOMPUTED[memory.activation_checkpointing]
    compute = flops / (parallel.world_size * device.bf16_tflops * 1e12 * EFFICIENCY[kind])
    own_tokens = work.num_tokens / parallel.num_data_ranks
    busy = compute + _of_layers(model, parallel, memory, own_tokens, device)
    share = model.parameters / (parallel.pp * parallel.tp)
    ranks = parallel.fsdp_size * parallel.dp_replicate
    # Weights are gathered once in a step, in the compute dtype, and gradients reduced once, in fp32.
    sharded = share * (model.compute + model.master) * (ranks - 1) / ranks / _link(parallel, "dp", device)
    moments = 2 * 2 * model.master * share / parallel.fsdp_size if memory.offload_optimizer else 0.0
    return busy / (1 - bubble) + 0.5 * sharded + moments / (PCIE_GB_PER_S * 1e9)


def _of_layers(
    model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, own_tokens: float, device: Device
) -> float:
    """Seconds for the messages inside of layers, of all layers of a rank."""
    config = model.config
    layers, passes = config.num_hidden_layers / parallel.pp, 3 if memory.activation_checkpointing == "full" else 2
    hidden = own_tokens / parallel.cp * config.hidden_size * model.compute
    seconds = 0.0
    if parallel.tp > 1:  # two all-reduces a layer and pass
        seconds += 2 * passes * 2 * hidden * (parallel.tp - 1) / parallel.tp / _link(parallel, "tp", device)
    if parallel.cp > 1:  # keys and values are gathered, and their gradients scattered
        heads = model.values.get("num_key_value_heads") or config.num_attention_heads
        width = (model.values.get("head_dim") or config.hidden_size // config.num_attention_heads) * heads
        seconds += (passes + 1) * 2 * own_tokens * width * model.compute / _link(parallel, "cp", device)
    if parallel.ep > 1:  # a token goes once to each other rank with experts of its own, and a sum comes back
        met = (parallel.ep - 1) * (1 - (1 - 1 / parallel.ep) ** experts_per_token(config))
        seconds += 2 * passes * met * hidden / _link(parallel, "ep", device)
    return layers * seconds


def _link(parallel: ParallelConfig, axis: str, device: Device) -> float:
    """Bytes a second that a group of ranks exchanges: tp has neighbouring ranks, then cp with dp_shard."""
    span = {
        "tp": parallel.tp,
        "cp": parallel.tp * parallel.cp,
        "ep": parallel.tp * parallel.ep,
        "dp": parallel.tp * parallel.fsdp_size * parallel.dp_replicate,
    }[axis]
    return 1e9 * (device.link_gb_per_s if span <= GPUS_PER_HOST else min(device.link_gb_per_s, NETWORK_GB_PER_S))


def rough_bubble(parallel: ParallelConfig, num_microbatches: int) -> float:
    """The textbook's bubble of a schedule with equal stages, for a first order of many layouts."""
    extra = (parallel.pp - 1) / parallel.virtual_stages
    return extra / (max(num_microbatches, 1) + extra)


def tokens_of(microbatches: int, capacity: int, efficiency: float | None) -> float:
    """Tokens of the global batch.

    Args:
        microbatches: number of microbatches of all data ranks.
        capacity: most tokens of a microbatch.
        efficiency: share of it that is filled; None counts full ones.
    """
    return math.ceil(microbatches * capacity * (efficiency or 1.0))
