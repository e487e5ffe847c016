"""The command: plans a config's layout, prints it, and looks for layouts that would fit where it does not."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_rl.batch import assign_bins
from automodel_rl.config import DPOConfig, GRPOConfig, ParallelConfig, RunConfig, SFTConfig
from automodel_rl.config.load import check_config
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.errors import DoesNotFitError, InputError
from automodel_rl.model.hf_read import describe_model, read_config, resolve_checkpoint
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.parallel.combinations import ModelDescription, check_supported
from automodel_rl.tools.plan.memory import MemoryModel, StepPlan

AnyConfig = SFTConfig | DPOConfig | GRPOConfig
GIB = 2**30
DEVICES = {"A100": 79.2, "H100": 79.2, "H200": 139.8, "B200": 178.4}
"""Memory that the driver reports, in GiB."""

USABLE = 0.92
"""Share of it that a step may fill; the rest is for the context, NCCL's buffers and fragmentation."""

MOST_TRIED = 200
"""Other layouts that are looked at when the one given does not fit."""

SAMPLE = 512
"""Examples that are tokenised to see how long they are and how well they pack."""


@dataclass(frozen=True)
class Packing:
    """How the user's data fills rows.

    Attributes:
        rows: of a step, over all data ranks.
        efficiency: tokens / (rows x capacity); None if there were no data to look at.
    """

    rows: int
    efficiency: float | None


def plan(config: AnyConfig, num_gpus: int | None, device: str, as_json: bool) -> None:
    """Prints the plan.

    Args:
        config: of the run.
        num_gpus: spread dp_shard over so many ranks; None takes the layout as it is.
        device: one of `DEVICES`.
        as_json: one JSON object in place of tables.

    Raises:
        InputError: the layout is not supported, or does not divide the GPUs.
        DoesNotFitError: it needs more memory than the device has.
    """
    if num_gpus is not None:
        config = with_layout(config, _spread(config.parallel, num_gpus), config.memory)
    parallel = config.parallel
    full = read_config(resolve_checkpoint(config.model.path, with_weights=False))
    description = describe_model(full)
    check_supported(description, config.model, parallel, config.memory)
    compute, _ = dtypes_of(config.model)
    model = MemoryModel(full, config.model, config.batch.row_tokens, isinstance(config, GRPOConfig))
    packing = measure_packing(config)
    step = model.plan(parallel, config.memory, _microbatches(packing, parallel))
    engine = engine_bytes(config, sum(step.stage_weights) * compute.itemsize, device)
    capacity = DEVICES[device] * USABLE * GIB - engine
    fits = step.peak <= capacity
    others = [] if fits else nearest_that_fit(model, description, config, parallel, packing, capacity)
    if as_json:
        record = _record(parallel, step, packing, device, fits, others)
        print(json.dumps(record | {"rollout_engine_bytes": engine}))
    else:
        print(_tables(parallel, step, packing, device))
        if engine:
            print(f"rollout engine: {engine / GIB:.1f} GiB on every rank, besides the step")
        for other in others:
            print(f"would fit: {other}")
    if not fits:
        raise DoesNotFitError(
            f"verdict: does not fit: {step.peak / GIB:.1f} GiB on the fullest rank, and {device} has "
            f"{capacity / GIB:.1f} GiB to fill"
        )
    if not as_json:
        print(f"verdict: fits: {step.peak / GIB:.1f} of {capacity / GIB:.1f} GiB that {device} has to fill")


def engine_bytes(config: RunConfig, model_bytes: int, device: str) -> float:
    """What a rollout engine takes on each rank's device."""
    if not isinstance(config, GRPOConfig):
        return 0
    rollout = config.rollout
    if rollout.engine == "transformers":
        return model_bytes
    own_devices = rollout.vllm.servers or rollout.vllm.devices
    return 0 if own_devices else rollout.vllm.memory_fraction * DEVICES[device] * GIB


def _spread(parallel: ParallelConfig, num_gpus: int) -> ParallelConfig:
    rest = parallel.pp * parallel.tp * parallel.cp * parallel.dp_replicate
    if num_gpus % rest:
        raise InputError(f"--gpus {num_gpus}: must be a multiple of parallel.pp x tp x cp x dp_replicate = {rest}")
    return parallel.model_copy(update={"dp_shard": num_gpus // rest})


def with_layout(config: AnyConfig, parallel: ParallelConfig, memory: MemoryConfig) -> AnyConfig:
    """The config with another layout.

    Raises:
        InputError: the two do not go together.
    """
    changed = {"parallel": parallel.model_dump(), "memory": memory.model_dump()}
    return check_config(type(config), config.model_dump() | changed)


def _microbatches(packing: Packing, parallel: ParallelConfig) -> int:
    """Rows of a data rank; a pipeline has no fewer than stages."""
    return max(parallel.pp, math.ceil(packing.rows / parallel.num_data_ranks))


def measure_packing(config: AnyConfig) -> Packing:
    """Packs a sample of the training data; where there is none, every sequence is taken to fill a row.

    Completions are not there yet when a policy is trained; each is taken to be as long as it may get.
    """
    capacity, count = config.batch.row_tokens, config.sequences_per_step
    if isinstance(config, GRPOConfig):
        longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        return Packing(math.ceil(count / (capacity // longest)), None)
    if not all(Path(source.path).is_file() for source in config.data.train):
        return Packing(count, None)
    from automodel_rl.data.chat import ChatTokenizer, load_tokenizer
    from automodel_rl.data.draws import GlobalBatches
    from automodel_rl.data.examples import ChatDataset, PairDataset, checked

    folder = resolve_checkpoint(config.model.path, with_weights=False)
    tokenizer = load_tokenizer(folder, config.data, read_config(folder).vocab_size)
    kind, train_on = (ChatDataset, config.data.train_on) if isinstance(config, SFTConfig) else (PairDataset, "last")
    chat = ChatTokenizer(tokenizer, train_on)
    context = describe_model(read_config(folder)).context
    dataset = kind(config.data.train, chat, capacity, context, config.data.overlong)
    size = min(count // kind.together, SAMPLE)
    draws = next(iter(GlobalBatches(dataset.sources.sizes, dataset.sources.weights, size, config.seed)))
    examples = [checked(dataset[draw]) for draw in draws]
    lengths = [sum(map(len, example.sequences)) for example in examples if example.sequences]
    bins = assign_bins(lengths, capacity)
    rows = math.ceil(len(bins) * count / (len(draws) * kind.together))
    return Packing(rows, sum(lengths) / (len(bins) * capacity))


def nearest_that_fit(
    model: MemoryModel,
    description: ModelDescription,
    config: AnyConfig,
    parallel: ParallelConfig,
    packing: Packing,
    capacity: float,
) -> list[str]:
    """Up to three layouts on as many GPUs that fit: those with the fewest changes."""
    candidates = [
        (_changes(parallel, candidate, config.memory, memory), candidate, memory)
        for candidate, memory in _candidates(parallel, config.memory)
    ]
    found: list[str] = []
    for changes, candidate, memory in sorted(candidates, key=lambda c: len(c[0]))[:MOST_TRIED]:
        try:
            with_layout(config, candidate, memory)
            check_supported(description, config.model, candidate, memory)
        except InputError:
            continue
        step = model.plan(candidate, memory, _microbatches(packing, candidate))
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


def _tables(parallel: ParallelConfig, step: StepPlan, packing: Packing, device: str) -> str:
    lines = [
        f"{parallel.world_size} ranks of {device}: {parallel}",
        "mesh (pp, dp_replicate, fsdp, tp) = "
        f"({parallel.pp}, {parallel.dp_replicate}, {parallel.fsdp_size}, {parallel.tp})"
        + (
            f", experts (ep_shard, ep) = ({parallel.fsdp_size // parallel.ep}, {parallel.ep})"
            if parallel.ep > 1
            else ""
        ),
        "",
        "stage  layers  parameters",
        *(
            f"{stage:5}  {layers:6}  {weights / 1e9:9.3f}B"
            for stage, (layers, weights) in enumerate(zip(step.layers, step.stage_weights, strict=True))
        ),
        "",
        "GiB on the first rank of each pipeline rank",
        "rank  weights  moments  gathered  gradients  activations  buffers  head  backward   peak",
    ]
    for rank, memory in enumerate(step.ranks):
        parts = (
            (memory.weights, 7), (memory.moments, 7), (memory.gathered, 8), (memory.gradients, 9),
            (memory.activations, 11), (memory.buffers, 7), (memory.head, 4), (memory.backward, 8), (memory.peak, 5),
        )  # fmt: skip
        lines.append(f"{rank:4}  " + "  ".join(f"{value / GIB:{width}.2f}" for value, width in parts))
    efficiency = "not known: no data to look at" if packing.efficiency is None else f"{packing.efficiency:.3f}"
    lines += [
        "",
        f"largest all-gather {step.largest_gather / GIB:.2f} GiB",
        f"{packing.rows} rows a step, {step.timeline.num_microbatches} microbatches on each data rank; "
        f"packing efficiency {efficiency}",
        f"bubble of the schedule {100 * step.timeline.bubble:.1f}% (stages weighed by their parameters)",
    ]
    return "\n".join(lines)


def _record(
    parallel: ParallelConfig, step: StepPlan, packing: Packing, device: str, fits: bool, others: list[str]
) -> dict:
    return {
        "layout": parallel.model_dump(),
        "world_size": parallel.world_size,
        "device": device,
        "layers_per_stage": step.layers,
        "parameters_per_stage": step.stage_weights,
        "bytes": [{**asdict(rank), "peak": rank.peak} for rank in step.ranks],
        "peak_bytes": step.peak,
        "largest_gather_bytes": step.largest_gather,
        "microbatches": step.timeline.num_microbatches,
        "bubble": step.timeline.bubble,
        "packing": asdict(packing),
        "fits": fits,
        "would_fit": others,
    }
