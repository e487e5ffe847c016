"""The capacity of microbatches that a device's memory allows."""

from automodel_rl.config import GRPOConfig, ParallelConfig, RunConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.parallel.pipeline.schedules import fill_up_to

STEP = 1024
"""Capacities are multiples of this many tokens."""

MOST_TOKENS = 2**17
"""Largest capacity. Matrix products of so many tokens are as fast as they get."""


def largest_microbatch(model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, num_bytes: float) -> int:
    """The most tokens, a multiple of `STEP`, with which a step stays within `num_bytes` on every rank; 0 if none do.

    Args:
        model: the memory model; its own capacity does not count.
        parallel: the layout.
        memory: what is recomputed and offloaded.
        num_bytes: bytes that a step may take.
    """

    def fits(steps: int) -> bool:
        # Gradients of several microbatches are summed, which takes more memory than those of one.
        count = fill_up_to(2 * parallel.pp, parallel) if parallel.pp > 1 else 2
        return model.with_microbatches_of(steps * STEP).plan(parallel, memory, count).peak <= num_bytes

    least, most = 0, MOST_TOKENS // STEP
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least * STEP


def generator_bytes(config: RunConfig, model_bytes: int, device_bytes: float) -> float:
    """Bytes that a generator takes on each rank's device, including the buffers for weight syncs.

    Args:
        config: the run's config.
        model_bytes: bytes of the model's weights in the dtype in which they are sent.
        device_bytes: memory of the device.
    """
    if not isinstance(config, GRPOConfig):
        return 0
    rollout, sync = config.rollout, config.weight_sync
    buffers = sync.num_buffers * min(sync.buffer_mib * 2**20, model_bytes)
    if rollout.devices or (rollout.generator == "vllm" and rollout.vllm.servers):
        return buffers
    on_device = model_bytes if rollout.generator == "transformers" else rollout.vllm.memory_fraction * device_bytes
    return buffers + on_device
