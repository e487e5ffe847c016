"""The capacity of microbatches that a device's memory allows."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from automodel_rl.config import GRPOConfig, ParallelConfig, RunConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.estimate.rollout_phases import rollout_phases
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.parallel.pipeline.schedules import fill_up_to

STEP = 1024
"""Capacities are multiples of this many tokens."""

MOST_TOKENS = 2**17
"""Largest capacity. Matrix products of so many tokens are as fast as they get."""


USED = 0.85
"""Share of a device's memory that a step may fill if the size of microbatches is left open. The rest is for libraries,
gaps, and what the estimate leaves out."""

MOST_IN_A_PIPELINE = 8192
"""Largest capacity in a pipeline, which needs several microbatches for each of its ranks."""

GIB = 2**30


@dataclass(frozen=True)
class MicrobatchSize:
    """The capacity of microbatches that a device allows.

    Attributes:
        num_tokens: most tokens of a microbatch; 0 if not even `STEP` fit.
        needed: tokens that a microbatch must hold.
        room: bytes that a step may fill.
        planned: bytes of a step on the fullest rank.
    """

    num_tokens: int
    needed: int
    room: float
    planned: int

    @property
    def fits(self) -> bool:
        return self.num_tokens >= self.needed


def choose_microbatch_size(config: RunConfig, language: PretrainedConfig, device_bytes: float) -> MicrobatchSize:
    """The largest capacity of microbatches that a device's memory allows, for a text model.

    Args:
        config: the run's config.
        language: the Hugging Face config of the language model.
        device_bytes: memory of the device.

    """
    model = MemoryModel(language, config.model, STEP, config.optimizer)
    parallel, memory = config.parallel, config.memory
    longest = config.longest_sequence if isinstance(config, GRPOConfig) else 0
    step = model.plan(parallel, memory, parallel.pp)
    weights = sum(step.stage_weights) * dtypes_of(config.model)[0].itemsize
    room = USED * device_bytes - rollout_phases(config, language, weights, step.ranks[0], device_bytes).beside_training
    num_tokens = largest_microbatch(model, parallel, memory, room)
    if parallel.pp > 1:
        num_tokens = min(num_tokens, max(MOST_IN_A_PIPELINE, -(-longest // STEP) * STEP))
    planned = model.with_microbatches_of(max(num_tokens, STEP)).plan(parallel, memory, 2 * parallel.pp).peak
    return MicrobatchSize(num_tokens, max(longest, STEP), room, planned)


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
