"""What a config leaves open of a step's memory, decided together: the fastest that fits into a device."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from automodel_rl.config import AnyRun, ParallelConfig, RunConfig
from automodel_rl.config.model import MemoryConfig, Recomputed
from automodel_rl.config.parallel import Fsdp
from automodel_rl.errors import InputError
from automodel_rl.estimate.further_models import ModelsBeside
from automodel_rl.estimate.memory import MemoryModel
from automodel_rl.estimate.rollout_phases import has_adapters_alone, rollout_phases
from automodel_rl.families.known import language_config
from automodel_rl.parallel.pipeline.schedules import fill_up_to
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import describe_model
from automodel_rl.support.table import check_supported

NONE_BESIDE = ModelsBeside()

STEP = 1024
"""Capacities are multiples of this many tokens."""

MOST_TOKENS = 2**17
"""Largest capacity. Matrix products of so many tokens are as fast as they get."""

ENOUGH_TOKENS = 2**13
"""Capacity with which matrix products are nearly as fast as they get. Less memory for other things comes first."""

USED = 0.85
"""Share of a device's memory that a step may fill if it is left open how. The rest is for libraries, gaps, and what the
estimate leaves out."""

MOST_IN_A_PIPELINE = 8192
"""Largest capacity in a pipeline, which needs several microbatches for each of its ranks."""

MOST_BESIDE_A_GENERATOR = 2**15
"""Largest capacity on a device where a generator keeps its memory while the model trains. Larger ones would be hardly
faster, and leave nothing for what neither side has planned."""

RECOMPUTED: dict[Recomputed, float] = {"none": 1.0, "selective": 1.06, "full": 4 / 3, "offload": 1.4}
"""Work of a step with recomputation, in units of a forward and a backward without it. Attention does not count."""

LEFT_TO_AUTO: tuple[Recomputed, ...] = ("none", "selective", "full")
"""What memory.activation_checkpointing=auto chooses among. It does not know the host's memory, which offload needs."""

SHARDED: dict[Fsdp, float] = {"keep": 1.0, "reduce": 1.04, "reshard": 1.1}
"""Time of a step by `parallel.fsdp`, in units of one that keeps weights gathered, measured with microbatches of 16,384
tokens on two GPUs (benchmarks/README.md)."""

OFFLOADED = 1.15
"""Time of a step with `memory.offload_optimizer`, in units of one without. It depends on the tokens of a step."""

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """A way to run a step on a device.

    Attributes:
        parallel, memory: the config's sections, with everything decided.
        num_tokens: capacity of a microbatch; 0 if not even `STEP` fit.
        needed: tokens that a microbatch must hold.
        room: bytes that a step may fill.
        planned: bytes of a step on the fullest rank.
        beside: bytes that a generator on the device and buffers of weight syncs have meanwhile.
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
        """The config with what has been decided. If no microbatch fits, it has the smallest that is needed."""
        tokens = max(self.num_tokens, self.needed)
        batch = config.batch.model_copy(update={"microbatch_tokens": tokens})
        decided = {"parallel": self.parallel, "memory": self.memory, "batch": batch}
        if config.components is not None:  # the language model's layout stands there, too
            language = config.components.language.model_copy(update={"fsdp": self.parallel.fsdp})
            decided["components"] = config.components.model_copy(update={"language": language})
        return config.model_copy(update=decided)


def fit_to_device(
    config: RunConfig, whole: PretrainedConfig, device_bytes: float, beside: ModelsBeside = NONE_BESIDE
) -> Fit:
    """Decides `parallel.fsdp`, `memory.activation_checkpointing`, `memory.offload_optimizer` and
    `batch.microbatch_tokens`, where they are `auto`.

    The fastest way with which microbatches of a given capacity fit, or those of `ENOUGH_TOKENS`. If none allows that,
    the one that allows the largest microbatches. Memory of encoders does not count.

    Args:
        config: the run's config.
        whole: the Hugging Face config of the whole model.
        device_bytes: memory of the device.
        beside: the models beside this one.
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
    """Ways to run a step that the config allows and the table supports, the fastest first."""
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
    beside: ModelsBeside,
    parallel: ParallelConfig,
    memory: MemoryConfig,
) -> Fit:
    """A way with the capacity that the config gives, or the largest one that fits."""
    given = config.batch.microbatch_tokens
    longest = config.longest_sequence
    step = model.plan(parallel, memory, parallel.pp)
    copy_bytes = model.copy_bytes(step, has_adapters_alone(config))
    phases = rollout_phases(config, model.config, copy_bytes, step.ranks[0], device_bytes)
    room = USED * device_bytes - phases.beside_training - beside.lasting(parallel, memory)
    num_tokens = largest_microbatch(model, parallel, memory, room) if given == "auto" else given
    if parallel.pp > 1 and given == "auto":
        num_tokens = min(num_tokens, max(MOST_IN_A_PIPELINE, -(-longest // STEP) * STEP))
    if phases.shares_memory and given == "auto":
        num_tokens = min(num_tokens, max(MOST_BESIDE_A_GENERATOR, -(-longest // STEP) * STEP))
    fullest = max(step.ranks, key=lambda rank: rank.weights + rank.moments)

    def busiest(tokens: int) -> int:
        return beside.busiest(parallel, memory, max(tokens, STEP), fullest)

    if given == "auto":
        num_tokens = (
            _largest(-(-longest // STEP), num_tokens // STEP, lambda steps: busiest(steps * STEP) <= room) * STEP
        )
    planned = max(_peak(model, parallel, memory, max(num_tokens, STEP)), busiest(num_tokens))
    needed = max(longest, STEP) if given == "auto" else given
    return Fit(parallel, memory, num_tokens, needed, room, planned, phases.beside_training)


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; `most` if that is below `least`, and at least `least` else."""
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return most


def _peak(model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, num_tokens: int) -> int:
    """Bytes of a step with microbatches of so many tokens: of several, whose gradients are summed, which takes more
    memory than those of one."""
    count = fill_up_to(2 * parallel.pp, parallel) if parallel.pp > 1 else 2
    return model.with_microbatches_of(num_tokens).plan(parallel, memory, count).peak


def largest_microbatch(model: MemoryModel, parallel: ParallelConfig, memory: MemoryConfig, num_bytes: float) -> int:
    """The most tokens, a multiple of `STEP`, with which a step stays within `num_bytes` on every rank; 0 if none do.

    Args:
        model: the memory model; its own capacity does not count.
        parallel: the layout.
        memory: what is recomputed and offloaded.
        num_bytes: bytes that a step may take.
    """

    most = MOST_TOKENS // STEP if model.least(parallel, memory) <= num_bytes else 0
    return _largest(0, most, lambda steps: _peak(model, parallel, memory, steps * STEP) <= num_bytes) * STEP
