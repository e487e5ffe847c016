"""Joint choice of a config's `auto` memory settings: the fastest that fit into a device."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from automodel_rl.config import AnyRun, ParallelConfig, RunConfig
from automodel_rl.config.model import MemoryConfig, Recomputed
from automodel_rl.config.parallel import Fsdp
from automodel_rl.errors import InputError
from automodel_rl.estimate.further_models import FurtherModelsMemory
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.estimate.rollout_phases import has_adapters_alone, rollout_phases
from automodel_rl.families.known import language_config
from automodel_rl.parallel.pipeline.schedules import fill_up_to
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import describe_model
from automodel_rl.support.table import check_supported

NONE_BESIDE = FurtherModelsMemory()

STEP = 1024
"""Capacities are multiples of this many tokens."""

MAX_TOKENS = 2**17
"""Maximum capacity, with which matrix products reach their full speed."""

ENOUGH_TOKENS = 2**13
"""Capacity with which matrix products nearly reach their full speed. Beyond it, avoiding memory savings takes
precedence."""

USED = 0.85
"""Fraction of a device's memory that an `auto` step may fill. The rest is for libraries, fragmentation, and what the
estimate does not cover."""

MAX_IN_A_PIPELINE = 8192
"""Maximum capacity in a pipeline, which needs several microbatches per rank."""

MAX_BESIDE_A_GENERATOR = 2**15
"""Maximum capacity on a device where a generator keeps its memory during training. Larger ones would be hardly faster,
and leave no margin for unplanned memory."""

RECOMPUTED: dict[Recomputed, float] = {"none": 1.0, "selective": 1.06, "full": 4 / 3, "offload": 1.4}
"""Work of a step by kind of recomputation, relative to a forward and backward without it, ignoring attention."""

LEFT_TO_AUTO: tuple[Recomputed, ...] = ("none", "selective", "full")
"""Choices of memory.activation_checkpointing=auto. It does not know the host memory that offload needs."""

SHARDED: dict[Fsdp, float] = {"keep": 1.0, "reduce": 1.04, "reshard": 1.1}
"""Time of a step by `parallel.fsdp`, relative to keep, measured with microbatches of 16,384 tokens on two GPUs
(benchmarks/speed.md)."""

OFFLOADED = 1.15
"""Time of a step with `memory.offload_optimizer`, relative to one without. Depends on the tokens of a step."""

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """A way to run a step on a device.

    Attributes:
        parallel, memory: config sections with all settings resolved.
        num_tokens: microbatch capacity; 0 if not even `STEP` fits.
        needed: tokens that a microbatch must hold.
        room: bytes that a step may fill.
        planned: bytes of a step on the fullest rank.
        beside: bytes of a generator on the device and of weight-sync buffers.
    """

    parallel: ParallelConfig
    memory: MemoryConfig
    num_tokens: int
    needed: int
    room: float
    planned: int
    beside: float = 0

    @property
    def fits(self) -> bool:
        return self.num_tokens >= self.needed and self.planned <= self.room

    def of(self, config: AnyRun) -> AnyRun:
        """Returns the config with the resolved settings. If no microbatch fits, uses the smallest that is needed."""
        tokens = max(self.num_tokens, self.needed)
        batch = config.batch.model_copy(update={"microbatch_tokens": tokens})
        decided = {"parallel": self.parallel, "memory": self.memory, "batch": batch}
        if config.components is not None:  # holds the language model's layout, too
            language = config.components.language.model_copy(update={"fsdp": self.parallel.fsdp})
            decided["components"] = config.components.model_copy(update={"language": language})
        return config.model_copy(update=decided)


def fit_to_device(
    config: RunConfig, whole: PretrainedConfig, device_bytes: float, beside: FurtherModelsMemory = NONE_BESIDE
) -> Fit:
    """Resolves `parallel.fsdp`, `memory.activation_checkpointing`, `memory.offload_optimizer` and
    `batch.microbatch_tokens` where they are `auto`.

    Takes the fastest way in which microbatches of the given capacity fit, or those of `ENOUGH_TOKENS`; if there is
    none, the way with the largest microbatches. Ignores the memory of encoders. `whole` is the Hugging Face config of
    the whole model.
    """
    model = MemoryModel(language_config(whole), config.model, STEP, config.optimizer)
    tries: list[Fit] = []
    for parallel, memory in _ways(config, whole):
        tries.append(_try(config, model, device_bytes, beside, parallel, memory))
        is_enough = config.batch.microbatch_tokens != "auto" or tries[-1].num_tokens >= ENOUGH_TOKENS
        if tries[-1].fits and is_enough:
            return tries[-1]
    return max(reversed(tries), key=lambda found: (found.num_tokens, -found.planned))


def _ways(config: RunConfig, whole: PretrainedConfig) -> Iterator[tuple[ParallelConfig, MemoryConfig]]:
    """Yields ways to run a step that the config and the support table allow, fastest first."""
    fsdp, mode, offload = config.parallel.fsdp, config.memory.activation_checkpointing, config.memory.offload_optimizer
    modes: tuple[Recomputed, ...] = LEFT_TO_AUTO if mode == "auto" else (mode,)
    ways = itertools.product(
        tuple(SHARDED) if fsdp == "auto" else (fsdp,),
        modes,
        (False, True) if offload == "auto" else (offload,),
    )

    def cost(way: tuple[Fsdp, Recomputed, bool]) -> float:
        sharded, recomputed, offloaded = way
        return RECOMPUTED[recomputed] * SHARDED[sharded] * (OFFLOADED if offloaded else 1.0)

    description = describe_model(whole)
    for sharded, recomputed, offloaded in sorted(ways, key=cost):
        parallel = config.parallel.model_copy(update={"fsdp": sharded})
        memory = config.memory.model_copy(
            update={"activation_checkpointing": recomputed, "offload_optimizer": offloaded}
        )
        try:
            check_supported(Combination(description, config.model, parallel, memory, config.components))
        except InputError:
            continue
        yield parallel, memory


def _try(
    config: RunConfig,
    model: MemoryModel,
    device_bytes: float,
    beside: FurtherModelsMemory,
    parallel: ParallelConfig,
    memory: MemoryConfig,
) -> Fit:
    """Evaluates a way with the configured capacity, or the largest that fits."""
    given = config.batch.microbatch_tokens
    longest = config.longest_sequence
    step = model.plan(parallel, memory, parallel.pp)
    copy_bytes = model.copy_bytes(step, has_adapters_alone(config))
    phases = rollout_phases(config, model.config, copy_bytes, step.ranks[0], device_bytes)
    room = USED * device_bytes - phases.beside_training - beside.resident_bytes(parallel, memory)
    num_tokens = largest_microbatch(model, parallel, memory, room) if given == "auto" else given
    if parallel.pp > 1 and given == "auto":
        num_tokens = min(num_tokens, max(MAX_IN_A_PIPELINE, -(-longest // STEP) * STEP))
    if phases.shares_memory and given == "auto":
        num_tokens = min(num_tokens, max(MAX_BESIDE_A_GENERATOR, -(-longest // STEP) * STEP))
    fullest = max(step.ranks, key=lambda rank: rank.weights + rank.moments)

    def busiest(tokens: int) -> int:
        return beside.peak_bytes(parallel, memory, max(tokens, STEP), fullest)

    if given == "auto":
        num_tokens = (
            _largest(-(-longest // STEP), num_tokens // STEP, lambda steps: busiest(steps * STEP) <= room) * STEP
        )
    planned = max(_peak(model, parallel, memory, max(num_tokens, STEP)), busiest(num_tokens))
    needed = max(longest, STEP) if given == "auto" else given
    return Fit(parallel, memory, num_tokens, needed, room, planned, phases.beside_training)


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number from `least` to `most` that fits, assuming that `least` does; `most` if that is below
    `least`."""
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return most


def _peak(model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, num_tokens: int) -> int:
    """Peak bytes of a step with several microbatches of `num_tokens` tokens, whose accumulated gradients take more
    memory than those of one."""
    count = fill_up_to(2 * parallel.pp, parallel) if parallel.pp > 1 else 2
    return model.with_microbatches_of(num_tokens).plan(parallel, memory, count).peak


def largest_microbatch(model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, num_bytes: float) -> int:
    """Returns the maximum number of tokens, a multiple of `STEP`, for which a step stays within `num_bytes` on every
    rank; 0 if there is none. The capacity of `model` is ignored."""

    most = MAX_TOKENS // STEP if model.least(parallel, memory) <= num_bytes else 0
    return _largest(0, most, lambda steps: _peak(model, parallel, memory, steps * STEP) <= num_bytes) * STEP
