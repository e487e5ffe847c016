"""Resolution of a config's `auto` memory settings before the model is loaded."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from automodel_rl.config import AnyRun, RunConfig
from automodel_rl.config.keys import as_yaml
from automodel_rl.errors import InputError
from automodel_rl.estimate.fit import GIB, Fit, fit_to_device
from automodel_rl.estimate.further_models import FurtherModelsMemory
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.launch.process_group import join_process_group

LEFT_OPEN = (
    ("parallel", "fsdp"),
    ("memory", "activation_checkpointing"),
    ("memory", "offload_optimizer"),
    ("batch", "microbatch_tokens"),
)
"""Sections and keys that may be `auto`."""

ON_CPU = 8192
"""Microbatch capacity on a CPU, where larger ones are no faster."""


def with_memory_decided(
    config: AnyRun, model: OpenedModel, further: Mapping[str, OpenedModel] | None = None
) -> tuple[AnyRun, str]:
    """Resolves all `auto` memory settings of a step. Returns the config and a message about the choice, empty if
    nothing was `auto`. `further` holds the checkpoints of the additional models, by name. A collective.

    Raises:
        InputError: no microbatch fits, or none with the longest completion.
    """
    device = join_process_group(config.world_size)
    if not _left_open(config):
        return config, ""
    if device.type != "cuda":
        return _on_cpu(config)
    # Use the smallest device, since all ranks need the same settings.
    own = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(own, op=dist.ReduceOp.MIN)
    described = config.model_copy(update={"model": model.model})
    beside = FurtherModelsMemory.of(config, {name: opened.whole for name, opened in (further or {}).items()})
    fit = fit_to_device(described, model.whole, own.item(), beside)
    if not fit.fits and config.batch.microbatch_tokens == "auto":
        raise InputError(
            f"batch.microbatch_tokens=auto: according to the plan, microbatches of {fit.num_tokens} tokens fit into "
            f"the {fit.room / GIB:.0f} GiB that a step may use, but {fit.needed} are needed: use more ranks, or "
            "shorter sequences, or train adapters (model.lora)"
        )
    decided = fit.of(config)
    return decided, _line(config, decided, fit)


def _on_cpu(config: AnyRun) -> tuple[AnyRun, str]:
    if config.batch.microbatch_tokens != "auto":
        return config, ""
    tokens = max(ON_CPU, config.longest_sequence)
    batch = config.batch.model_copy(update={"microbatch_tokens": tokens})
    return (
        config.model_copy(update={"batch": batch}),
        f"batch.microbatch_tokens=auto: {tokens:,} tokens; on a CPU larger ones are no faster",
    )


def _line(asked: RunConfig, decided: RunConfig, fit: Fit) -> str:
    """Returns the message about the choice, with the planned memory."""
    chosen = [
        f"{section}.{key}={as_yaml(getattr(getattr(decided, section), key))}" for section, key in _left_open(asked)
    ]
    plan = f"the plan uses {fit.planned / GIB:.0f} of {fit.room / GIB:.0f} GiB that a step may use"
    if fit.beside >= GIB:
        plan += f", in addition to {fit.beside / GIB:.0f} GiB for rollouts"
    if not fit.fits:
        plan += ": if memory runs out, lower batch.microbatch_tokens"
    return f"{' '.join(chosen)} (auto: {plan})"


def _left_open(config: RunConfig) -> list[tuple[str, str]]:
    return [(section, key) for section, key in LEFT_OPEN if getattr(getattr(config, section), key) == "auto"]
