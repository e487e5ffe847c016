"""Decides the capacity of microbatches if the config leaves it open."""

from typing import TypeVar

import torch

from automodel_rl.config import GRPOConfig, RunConfig
from automodel_rl.errors import InputError
from automodel_rl.estimate.microbatch_size import GIB, choose_microbatch_size
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

ON_CPU = 8192
"""Capacity on a CPU, where larger microbatches are no faster."""

AnyRun = TypeVar("AnyRun", bound=RunConfig)


def with_microbatch_size(config: AnyRun, handle: ModelHandle) -> tuple[AnyRun, str | None]:
    """The config with `batch.microbatch_tokens` decided, and the reason; None if the config gives it. A collective.

    Raises:
        InputError: no microbatch fits, or none with the longest completion.
    """
    if config.batch.microbatch_tokens != "auto":
        return config, None
    num_tokens, reason = _choose(config, handle)
    batch = config.batch.model_copy(update={"microbatch_tokens": num_tokens})
    return config.model_copy(update={"batch": batch}), f"{num_tokens:,} tokens; {reason}"


def _choose(config: RunConfig, handle: ModelHandle) -> tuple[int, str]:
    if handle.layout.device.type != "cuda":
        longest = config.longest_sequence if isinstance(config, GRPOConfig) else 0
        return max(ON_CPU, longest), "on a CPU larger ones are no faster"
    own = torch.cuda.get_device_properties(handle.layout.device).total_memory
    of_device = min(gather_objects(own, handle.layout.world_control))
    trained = config.model_copy(update={"model": handle.model})
    size = choose_microbatch_size(trained, handle.config, of_device)
    if not size.fits:
        raise InputError(
            f"batch.microbatch_tokens=auto: by the plan, microbatches of {size.num_tokens} tokens fit into the "
            f"{size.room / GIB:.0f} GiB that a step may fill, and {size.needed} are needed: use more ranks, "
            "memory.activation_checkpointing, or shorter sequences"
        )
    return size.num_tokens, f"the plan is {size.planned / GIB:.0f} of {size.room / GIB:.0f} GiB that a step may fill"
