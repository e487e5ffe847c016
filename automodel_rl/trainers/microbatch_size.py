"""Decides the capacity of microbatches if the config leaves it open."""

from dataclasses import dataclass
from typing import TypeVar

import torch

from automodel_rl.config import GRPOConfig, RunConfig
from automodel_rl.errors import InputError
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.estimate.microbatch_size import STEP, generator_bytes, largest_microbatch
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

USED = 0.85
"""Share of a device's memory that the plan may fill. The rest is for libraries, gaps, and what the plan leaves out."""

ON_CPU = 8192
"""Capacity on a CPU, where larger microbatches are no faster."""

GIB = 2**30

AnyRun = TypeVar("AnyRun", bound=RunConfig)


@dataclass(frozen=True)
class MicrobatchSize:
    """A capacity and the reason for it.

    Attributes:
        num_tokens: most tokens of a microbatch.
        reason: a text for the console.
        planned_bytes: bytes of the step on the fullest rank by the plan; 0 on a CPU.
    """

    num_tokens: int
    reason: str
    planned_bytes: int = 0


def with_microbatch_size(config: AnyRun, handle: ModelHandle) -> tuple[AnyRun, MicrobatchSize | None]:
    """The config with `batch.microbatch_tokens` decided, and the decision; None if the config gives it. A collective.

    Raises:
        InputError: not even a small microbatch fits, or not one with the longest prompt and completion.
    """
    if config.batch.microbatch_tokens != "auto":
        return config, None
    chosen = _choose(config, handle)
    batch = config.batch.model_copy(update={"microbatch_tokens": chosen.num_tokens})
    return config.model_copy(update={"batch": batch}), chosen


def _choose(config: RunConfig, handle: ModelHandle) -> MicrobatchSize:
    longest = 0
    if isinstance(config, GRPOConfig):
        longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    if handle.layout.device.type != "cuda":
        return MicrobatchSize(max(ON_CPU, longest), "on a CPU larger ones are no faster")
    model = MemoryModel(handle.config, config.model, STEP, isinstance(config, GRPOConfig), config.optimizer)
    of_device = min(gather_objects(torch.cuda.get_device_properties(0).total_memory, handle.layout.world_control))
    weights = sum(model.plan(config.parallel, config.memory, config.parallel.pp).stage_weights)
    room = USED * of_device - generator_bytes(config, weights * handle.dtype.itemsize, of_device)
    num_tokens = largest_microbatch(model, config.parallel, config.memory, room)
    if num_tokens < max(longest, STEP):
        raise InputError(
            f"batch.microbatch_tokens=auto: by the plan, microbatches of {num_tokens} tokens fit into the "
            f"{room / GIB:.0f} GiB that a step may fill, and {max(longest, STEP)} are needed: use more ranks, "
            "memory.activation_checkpointing, or shorter sequences"
        )
    planned = model.with_microbatches_of(num_tokens).plan(config.parallel, config.memory, 2 * config.parallel.pp).peak
    reason = f"the plan is {planned / GIB:.0f} of {room / GIB:.0f} GiB that a step may fill"
    return MicrobatchSize(num_tokens, reason, planned)
