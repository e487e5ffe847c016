"""Alternative layouts on as many GPUs, if the given one does not fit."""

import math
from collections.abc import Iterator

from automodel_rl.config import ParallelConfig
from automodel_rl.config.load import check_config
from automodel_rl.config.model import MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.support.description import ModelDescription
from automodel_rl.support.rule import Combination
from automodel_rl.support.table import check_supported
from automodel_rl.tools.plan.packing import AnyConfig, Packing, microbatches

GIB = 2**30

MOST_TRIED = 200
"""Most layouts that are tried when the given one does not fit."""


def nearest_that_fit(
    model: MemoryModel,
    description: ModelDescription,
    config: AnyConfig,
    parallel: ParallelConfig,
    packing: Packing,
    capacity: float,
) -> list[str]:
    """Up to three layouts on as many GPUs that fit, the ones with the fewest changes."""
    candidates = [
        (_changes(parallel, candidate, config.memory, memory), candidate, memory)
        for candidate, memory in _candidates(parallel, config.memory)
    ]
    found: list[str] = []
    for changes, candidate, memory in sorted(candidates, key=lambda c: len(c[0]))[:MOST_TRIED]:
        try:
            check_supported(Combination.of_run(description, with_layout(config, candidate, memory)))
        except InputError:
            continue
        step = model.plan(candidate, memory, microbatches(packing, candidate))
        if step.peak <= capacity:
            found.append(f"{', '.join(changes)} ({step.peak / GIB:.1f} GiB, bubble {100 * step.timeline.bubble:.0f}%)")
        if len(found) == 3:
            break
    return found


def _candidates(parallel: ParallelConfig, memory: MemoryConfig) -> Iterator[tuple[ParallelConfig, MemoryConfig]]:
    world = parallel.world_size
    powers = [2**i for i in range(int(math.log2(world)) + 1)]
    for pp in sorted({parallel.pp, *powers}):
        for tp in sorted({parallel.tp, *(p for p in powers if p <= 8)}):
            for cp in sorted({parallel.cp, *(p for p in powers if p <= 16)}):
                rest = pp * tp * cp * parallel.dp_replicate
                if world % rest:
                    continue
                for ep in sorted({parallel.ep, *(p for p in powers if p <= 64)}) if parallel.ep > 1 else [1]:
                    for mode in ("none", "selective", "full"):
                        changed = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_shard": world // rest}
                        if pp != parallel.pp:
                            changed |= {"layers_per_stage": None}
                        if pp == 1:
                            changed |= {"virtual_stages": 1}
                        yield (
                            parallel.model_copy(update=changed),
                            memory.model_copy(update={"activation_checkpointing": mode}),
                        )


def _changes(old: ParallelConfig, new: ParallelConfig, old_memory: MemoryConfig, new_memory: MemoryConfig) -> list[str]:
    pairs = [("parallel", old, new), ("memory", old_memory, new_memory)]
    return [
        f"{section}.{key}={value}"
        for section, before, after in pairs
        for key, value in after.model_dump().items()
        if value != before.model_dump()[key]
    ]


def with_layout(config: AnyConfig, parallel: ParallelConfig, memory: MemoryConfig) -> AnyConfig:
    """The config with another layout.

    Raises:
        InputError: the config does not allow this layout.
    """
    changed = {"parallel": parallel.model_dump(), "memory": memory.model_dump()}
    return check_config(type(config), config.model_dump() | changed)
