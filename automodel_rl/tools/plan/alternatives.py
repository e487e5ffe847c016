"""Other layouts for the same run that fit, fastest first by estimate."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from automodel_rl.config import AnyRun, ParallelConfig, RunConfig
from automodel_rl.config.keys import as_yaml
from automodel_rl.config.load import check_config
from automodel_rl.config.model import MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.estimate.fit import GIB, RECOMPUTED, SHARDED
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.model.flops import AttentionFlops
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import ModelDescription
from automodel_rl.support.table import check_supported
from automodel_rl.tools.plan.devices import Device
from automodel_rl.tools.plan.packing import PlannedPacking, microbatches
from automodel_rl.tools.plan.speed import Work, rough_bubble, step_seconds, tokens_of

MAX_TRIED = 150
"""Maximum number of layouts whose memory is computed."""

BEST = 3


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        changes: its changes to the config, as overrides.
        peak: bytes on the fullest rank.
        seconds, tokens_per_second: estimates, the latter over all GPUs.
    """

    changes: tuple[str, ...]
    peak: int
    seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        return (
            f"{' '.join(f'--{change}' for change in self.changes)}  ({self.peak / GIB:.1f} GiB, about "
            f"{self.seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s)"
        )


class Search:
    """Search over the layouts of a run.

    Args:
        model: memory model with the config's microbatches.
        packing: packing of the data into microbatches.
        capacity: bytes that a step may fill.
    """

    def __init__(
        self,
        model: MemoryModel,
        description: ModelDescription,
        config: RunConfig,
        packing: PlannedPacking,
        device: Device,
        capacity: float,
    ):
        self.model, self.description, self.config = model, description, config
        self.packing, self.device, self.capacity = packing, device, capacity
        self.num_tokens = tokens_of(packing.microbatches, config.batch.capacity, packing.efficiency)
        attention = sum(map(AttentionFlops(model.config), packing.lengths))
        self.work = Work(self.num_tokens, attention / max(1, sum(packing.lengths)))

    def seconds(self, model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, bubble: float) -> float:
        """Estimates the step time of a layout. `model` may have any microbatch capacity; `bubble` as in
        `step_seconds`."""
        return step_seconds(model, parallel, memory, self.work, bubble, self.device)

    def best(self, world_size: int) -> list[Choice]:
        """Returns the fastest layouts on `world_size` GPUs that fit, with smaller microbatches if none fits
        otherwise."""
        capacity = self.config.batch.capacity
        longest = self.config.longest_sequence or 1024
        for tokens in (capacity, capacity // 2, capacity // 4):
            if tokens == capacity or tokens >= longest:
                found = self._best(world_size, tokens)
                if found:
                    return found
        return []

    def _best(self, world_size: int, num_tokens: int) -> list[Choice]:
        model = self.model.with_microbatches_of(num_tokens)
        candidates = [
            (
                self.seconds(model, parallel, memory, rough_bubble(parallel, self._count(parallel, num_tokens))),
                parallel,
                memory,
            )
            for parallel, memory in _candidates(
                self.config.parallel, self.config.memory, world_size, self.description.num_experts
            )
            if model.least(parallel, memory) <= self.capacity
        ]
        fastest_first = sorted(candidates, key=lambda candidate: candidate[0])
        found = self._tried(model, num_tokens, fastest_first)
        if not found:
            smallest_first = sorted(candidates, key=lambda candidate: model.least(*candidate[1:]))
            found = self._tried(model, num_tokens, smallest_first)
        return sorted(found, key=lambda choice: choice.seconds)[:BEST]

    def _tried(
        self, model: MemoryModel, num_tokens: int, candidates: list[tuple[float, ParallelConfig, MemoryConfig]]
    ) -> list[Choice]:
        """Returns up to 2 x `BEST` of the first candidates that fit."""
        found: list[Choice] = []
        tried = 0
        for _, parallel, memory in candidates:
            if not self._is_supported(parallel, memory):
                continue
            if model.least(parallel, memory) + model.min_activations(parallel, memory) > self.capacity:
                continue
            tried += 1
            step = model.plan(parallel, memory, self._count(parallel, num_tokens))
            if step.peak <= self.capacity:
                seconds = self.seconds(model, parallel, memory, step.timeline.bubble)
                changes = _changes(self.config.parallel, parallel, self.config.memory, memory)
                if num_tokens != self.config.batch.capacity:
                    changes.append(f"batch.microbatch_tokens {num_tokens}")
                found.append(Choice(tuple(changes), step.peak, seconds, self.num_tokens / seconds))
            if len(found) == 2 * BEST or tried == MAX_TRIED:  # the first ranking is nearly final
                break
        return found

    def _count(self, parallel: ParallelConfig, num_tokens: int) -> int:
        """Number of microbatches per data rank, each of at most `num_tokens` tokens."""
        more = self.config.batch.capacity / num_tokens
        return math.ceil(more * microbatches(self.packing, parallel))

    def _is_supported(self, parallel: ParallelConfig, memory: MemoryConfig) -> bool:
        try:
            check_supported(Combination.of_run(self.description, with_layout(self.config, parallel, memory)))
        except InputError:
            return False
        return True


def _candidates(
    parallel: ParallelConfig, memory: MemoryConfig, world: int, num_experts: int
) -> Iterator[tuple[ParallelConfig, MemoryConfig]]:
    powers = [2**i for i in range(int(math.log2(world)) + 1)]
    pps = sorted({parallel.pp, *powers})
    tps = sorted({parallel.tp, *(p for p in powers if p <= 8)})
    cps = sorted({parallel.cp, *(p for p in powers if p <= 16)})
    eps = sorted({parallel.ep, *(p for p in powers if p <= min(64, num_experts))}) if num_experts else [1]
    for pp, tp, cp, ep in itertools.product(pps, tps, cps, eps):
        rest = pp * tp * cp * parallel.dp_replicate
        if world % rest:
            continue
        changed = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_shard": world // rest}
        if pp != parallel.pp:
            changed |= {"layers_per_stage": None}
        if pp == 1:
            changed |= {"virtual_stages": 1}
        if cp == 1:
            changed |= {"cp_exchange": "all_gather"}
        for mode, offload, fsdp in itertools.product(RECOMPUTED, (False, True), SHARDED):
            saved = {"activation_checkpointing": mode, "offload_optimizer": offload}
            yield parallel.model_copy(update={**changed, "fsdp": fsdp}), memory.model_copy(update=saved)


def _changes(old: ParallelConfig, new: ParallelConfig, old_memory: MemoryConfig, new_memory: MemoryConfig) -> list[str]:
    pairs = [("parallel", old, new), ("memory", old_memory, new_memory)]
    return [
        f"{section}.{key} {as_yaml(value)}"
        for section, before, after in pairs
        for key, value in after.model_dump().items()
        if value != before.model_dump()[key]
    ]


def with_layout(config: AnyRun, parallel: ParallelConfig, memory: MemoryConfig) -> AnyRun:
    """Returns the config with another layout. Raises InputError if the config does not allow it."""
    changed = {"parallel": parallel.model_dump(), "memory": memory.model_dump()}
    return check_config(type(config), config.model_dump() | changed)
