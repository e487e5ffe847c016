"""Step time of a layout, estimated from matrix products, attention, communication and the pipeline bubble.

The estimate ranks layouts; it does not replace a measurement. One device's step is the time of its matrix products
plus that of the memory traffic between them, both fitted to measurements (benchmarks/speed.md): a dense 1.5B model
reaches 51% to 55% of the peak of an H200 and 44% to 46% of that of an H100, which has the same FLOP/s and 0.7 of the
bandwidth; a 3.2B mixture reaches 32% and 25%. Communication counts with the bandwidth of the link that its group
spans: NVLink within a host, the network between hosts.
"""

import math
from dataclasses import dataclass

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import RECOMPUTE_ALL, MemoryConfig
from automodel_rl.estimate.fit import RECOMPUTED, SHARDED
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.support.description import experts_per_token
from automodel_rl.tools.plan.devices import Device

PRODUCTS = {"dense": 1.25, "mixture": 1.8}
"""Time of a step's matrix products and attention, as a multiple of the time at the device's peak, by model type."""

TRAFFIC = {"dense": 0.0032, "mixture": 0.0063}
"""Time of a step's memory traffic in the same unit, per ratio of peak FLOP/s to memory bandwidth in byte/s."""

WAIT = {"tp": 3e-3, "cp": 3e-3, "ep": 8e-3}
"""Seconds of latency that a layer's communication adds to a microbatch's forward and backward, whatever its size. ep
is slowest, as the host must learn how many tokens arrive."""

NETWORK_GB_PER_S = 50.0
"""Bandwidth between hosts per GPU: 400 Gbit/s."""

PCIE_GB_PER_S = 50.0
"""Bandwidth to host memory, for offloaded optimizer moments."""

GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Work:
    """Work of a step.

    Attributes:
        num_tokens: tokens of the global batch.
        attention: attention FLOPs per token, forward and backward.
    """

    num_tokens: float
    attention: float = 0.0


def step_seconds(
    model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, work: Work, bubble: float, device: Device
) -> float:
    """Estimates the time of a training step. `bubble` is the share of the ranks' time that the pipeline schedule
    leaves idle."""
    kind = "mixture" if model.active_parameters < 0.9 * model.parameters else "dense"
    attention = work.attention * (RECOMPUTED["full"] if model.recomputes_attention(parallel, memory) else 1.0)
    flops = (6 * model.active_parameters * RECOMPUTED[memory.recomputed] + attention) * work.num_tokens
    peak = device.bf16_tflops * 1e12
    of_peak = PRODUCTS[kind] + TRAFFIC[kind] * peak / (device.memory_gb_per_s * 1e9)
    compute = flops / (parallel.world_size * peak) * of_peak
    own_tokens = work.num_tokens / parallel.num_data_ranks
    busy = compute + _of_layers(model, parallel, memory, own_tokens, device)
    share = model.parameters / (parallel.pp * parallel.tp)
    ranks = parallel.fsdp_size * parallel.dp_replicate
    # Weights are gathered in the compute dtype, and gradients reduced in fp32.
    of_all = share * (ranks - 1) / ranks / _link(parallel, "dp", device)
    sharded = of_all * ((2 if parallel.reshards else 1) * model.compute + model.gradient)
    moments = 2 * 2 * model.gradient * share / parallel.fsdp_size if memory.offloads_optimizer else 0.0
    if parallel.reduces_each:  # each microbatch communicates, overlapped with compute
        busy = max(
            SHARDED["reshard" if parallel.reshards else "reduce"] * busy, sharded * own_tokens / model.microbatch_tokens
        )
        return busy / (1 - bubble) + moments / (PCIE_GB_PER_S * 1e9)
    return busy / (1 - bubble) + 0.5 * sharded + moments / (PCIE_GB_PER_S * 1e9)


def _of_layers(
    model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, own_tokens: float, device: Device
) -> float:
    """Returns a rank's time for communication inside layers, over all its layers."""
    config = model.config
    layers, passes = config.num_hidden_layers / parallel.pp, 3 if memory.recomputed in RECOMPUTE_ALL else 2
    hidden = own_tokens / parallel.cp * config.hidden_size * model.compute
    seconds = 0.0
    if parallel.tp > 1:  # two all-reduces per layer and pass
        seconds += 2 * passes * 2 * hidden * (parallel.tp - 1) / parallel.tp / _link(parallel, "tp", device)
    if parallel.cp > 1:
        head_dim = model.values.get("head_dim") or config.hidden_size // config.num_attention_heads
        kv_heads = model.values.get("num_key_value_heads") or config.num_attention_heads
        if parallel.gathers_keys:  # keys and values are gathered, and their gradients scattered
            sent = (passes + 1) * 2 * own_tokens * kv_heads
        else:  # queries, keys, values and outputs go to the ranks of their heads, and gradients back
            away = own_tokens / parallel.cp * (parallel.cp - 1) / parallel.cp
            sent = passes * 2 * away * (config.num_attention_heads + kv_heads)
        seconds += sent * head_dim * model.compute / _link(parallel, "cp", device)
    if parallel.ep > 1:  # a token is sent once to each other rank with chosen experts, and a sum returns
        met = (parallel.ep - 1) * (1 - (1 - 1 / parallel.ep) ** experts_per_token(config))
        seconds += 2 * passes * met * hidden / _link(parallel, "ep", device)
    waits = sum(wait for axis, wait in WAIT.items() if getattr(parallel, axis) > 1)
    return layers * (seconds + waits * own_tokens / model.microbatch_tokens)


def _link(parallel: ParallelConfig, axis: str, device: Device) -> float:
    """Returns the bandwidth of a group in byte/s. tp ranks are adjacent, then cp with dp_shard."""
    span = {
        "tp": parallel.tp,
        "cp": parallel.tp * parallel.cp,
        "ep": parallel.tp * parallel.ep,
        "dp": parallel.tp * parallel.fsdp_size * parallel.dp_replicate,
    }[axis]
    return 1e9 * (device.link_gb_per_s if span <= GPUS_PER_HOST else min(device.link_gb_per_s, NETWORK_GB_PER_S))


def rough_bubble(parallel: ParallelConfig, num_microbatches: int) -> float:
    """The textbook bubble of a schedule with equal stages, for a first ranking of many layouts."""
    extra = (parallel.pp - 1) / parallel.virtual_stages
    return extra / (max(num_microbatches, 1) + extra)


def tokens_of(microbatches: int, capacity: int, efficiency: float | None) -> float:
    """Returns the tokens of the global batch.

    Args:
        microbatches: count over all data ranks.
        capacity: maximum tokens of a microbatch.
        efficiency: filled share of it; None counts full microbatches.
    """
    return math.ceil(microbatches * capacity * (efficiency or 1.0))
