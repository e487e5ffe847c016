"""Plans a config's layout and prints it as tables or JSON."""

import json
from dataclasses import asdict

from automodel_rl.config import AnyRun, ComponentsConfig, ParallelConfig, RunConfig
from automodel_rl.config.components import one_layout
from automodel_rl.config.keys import as_yaml
from automodel_rl.config.model import MemoryConfig
from automodel_rl.errors import DoesNotFitError, InputError
from automodel_rl.estimate.fit import GIB, fit_to_device
from automodel_rl.estimate.further_models import FurtherModelsMemory
from automodel_rl.estimate.memory import MemoryModel, StepPlan
from automodel_rl.estimate.rollout_phases import (
    USABLE_IN_ROLLOUTS,
    RolloutPhases,
    has_adapters_alone,
    rollout_phases,
)
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.tools.plan.alternatives import Search, with_layout
from automodel_rl.tools.plan.devices import Device
from automodel_rl.tools.plan.encoders import EncoderMemory, plan_encoders
from automodel_rl.tools.plan.packing import PlannedPacking, measure_packing, microbatches

USABLE = 0.92
"""Share of device memory that a step may fill. The rest is for the CUDA context, NCCL buffers and fragmentation."""


MULTIPLES = (1, 2, 4, 8, 16)
"""Multiples of the GPU count on which layouts are searched, until some fit."""

FASTER = 0.9
"""Largest estimated time of a layout shown as faster, relative to the given layout."""


def plan(config: RunConfig, num_gpus: int | None, device: Device, as_json: bool) -> None:
    """Prints the plan.

    Args:
        num_gpus: number of GPUs to fill by changing dp_shard; None keeps the layout.
        as_json: prints one JSON object instead of tables.

    Raises:
        InputError: the layout is not supported, or does not divide the GPUs.
        DoesNotFitError: the layout needs more memory than the device has.
    """
    opened = OpenedModel.open(config.model)
    description, config = opened.description, opened.checked(_on_gpus(config, num_gpus))
    beside = _models_beside(config)
    config = fit_to_device(config, opened.whole, device.num_bytes, beside).of(config)
    parallel = config.parallel
    model = MemoryModel(opened.whole, config.model, config.batch.capacity, config.optimizer)
    packing = measure_packing(config, opened)
    step = model.plan(parallel, config.memory, microbatches(packing, parallel))
    components = (config.components or one_layout(parallel, description.encoders)) if description.encoders else None
    encoders: dict[str, EncoderMemory] = {}
    if components is not None:
        encoders = plan_encoders(opened.whole, config.model, config.memory, components, packing, config.optimizer)
    fullest = max(step.ranks, key=lambda rank: rank.weights + rank.moments)
    lasting = beside.resident_bytes(parallel, config.memory)
    busiest = beside.peak_bytes(parallel, config.memory, config.batch.capacity, fullest)
    peak = max(_peak(step, encoders, components), busiest)
    copy_bytes = model.copy_bytes(step, has_adapters_alone(config))
    phases = rollout_phases(config, opened.language, copy_bytes, fullest, device.num_bytes, lasting)
    capacity = USABLE * device.num_bytes - phases.beside_training - lasting
    rollouts_fit = phases.peak <= USABLE_IN_ROLLOUTS * device.num_bytes
    fits = peak <= capacity and rollouts_fit
    search = Search(model, description, config, packing, device, capacity)
    seconds = search.seconds(model, parallel, config.memory, step.timeline.bubble)
    others = _others(search, parallel, fits, seconds) if not encoders and rollouts_fit else []
    if as_json:
        record = _record(parallel, step, packing, device.name, fits, [other for _, other in others])
        record |= _figures(config, peak, lasting, phases) | {
            "seconds": seconds,
            "tokens_per_second": search.num_tokens / seconds,
        }
        of_encoders = {name: {**asdict(encoder), "peak": encoder.peak} for name, encoder in encoders.items()}
        print(json.dumps(record | ({"encoders": of_encoders} if encoders else {})))
    else:
        print(_tables(parallel, config.memory, step, packing, device.name, config.batch.capacity))
        if components is not None:
            print(_encoders_table(encoders, components, packing))
        print(_beside_text(lasting, busiest), end="")
        print(f"{_phases_text(phases)}\n" if phases.rollout else "", end="")
        print(_speed_text(seconds, search.num_tokens))
        print(*(f"{why}: {other}\n" for why, other in others), sep="", end="")
    if not fits:
        raise DoesNotFitError(_misfit(peak, capacity, None if rollouts_fit else phases.peak, device))
    if not as_json:
        print(f"verdict: fits: {peak / GIB:.1f} of {capacity / GIB:.1f} usable GiB on {device.name}")


def _figures(config: RunConfig, peak: int, lasting: int, phases: RolloutPhases) -> dict[str, float]:
    return {
        "microbatch_tokens": config.batch.capacity,
        "world_size": config.world_size,
        "peak_bytes": peak,
        "further_model_bytes": lasting,
        "generator_bytes": phases.beside_training,
        "rollout_bytes": phases.rollout,
        "weight_sync_bytes": phases.weight_sync,
    }


def _models_beside(config: RunConfig) -> FurtherModelsMemory:
    wholes = {name: OpenedModel.open(asked.model).whole for name, asked in config.further_models.items()}
    return FurtherModelsMemory.of(config, wholes)


def _beside_text(lasting: int, busiest: int) -> str:
    if not busiest:
        return ""
    return (
        f"other models: {lasting / GIB:.1f} GiB on each rank, and {busiest / GIB:.1f} GiB more while one of them "
        "computes\n"
    )


def _misfit(peak: float, capacity: float, rollouts: float | None, device: Device) -> str:
    """Returns the verdict that training does not fit, or, given the bytes of `rollouts`, that rollouts do not."""
    if rollouts is None:
        return (
            f"verdict: does not fit: {peak / GIB:.1f} GiB on the fullest rank, and {device.name} has "
            f"{capacity / GIB:.1f} usable GiB"
        )
    return (
        f"verdict: does not fit: {rollouts / GIB:.1f} GiB in rollouts or weight syncs, and {device.name} has "
        f"{USABLE_IN_ROLLOUTS * device.num_bytes / GIB:.1f} GiB for them: lower rollout.generator.memory_fraction, or "
        "add --memory.offload {} --rollout.generator.sleep auto"
    )


def _speed_text(seconds: float, num_tokens: float) -> str:
    return f"about {seconds:.3g} s a step, {num_tokens / seconds:,.0f} tokens/s (an estimate, for comparisons)"


def _phases_text(phases: RolloutPhases) -> str:
    return (
        f"GiB on the fullest rank: {phases.beside_training / GIB:.1f} of the generator during the step; in rollouts "
        f"{phases.rollout / GIB:.1f}, in weight syncs {phases.weight_sync / GIB:.1f}, including the trainer's"
    )


def _others(search: Search, parallel: ParallelConfig, fits: bool, seconds: float) -> list[tuple[str, str]]:
    """Returns other layouts, each with its reason: it is faster, or fits where this one does not, possibly on more
    GPUs."""
    if fits:
        faster = [choice for choice in search.best(parallel.world_size) if choice.seconds < FASTER * seconds]
        return [("faster by the estimate", str(choice)) for choice in faster]
    for times in MULTIPLES:
        found = search.best(times * parallel.world_size)
        if found:
            why = "would fit" if times == 1 else f"would fit on {times * parallel.world_size} GPUs"
            return [(why, str(choice)) for choice in found]
    most = MULTIPLES[-1] * parallel.world_size
    return [("nothing found", f"no layout that was tried fits on up to {most} GPUs; adapters (model.lora) need less")]


def _peak(step: StepPlan, encoders: dict[str, EncoderMemory], components: ComponentsConfig | None) -> int:
    """Bytes on the fullest rank: the sum of all components on it."""
    if components is None:
        return step.peak
    beside = sum(encoder.peak for name, encoder in encoders.items() if components.is_colocated(name))
    return max(step.peak + beside, *(encoder.peak for encoder in encoders.values()))


def _encoders_table(encoders: dict[str, EncoderMemory], components: ComponentsConfig, packing: PlannedPacking) -> str:
    lines = [f"\n{components}"]
    for name, encoder in encoders.items():
        parts = {key: value for key, value in asdict(encoder).items() if key != "parameters"}
        sizes = ", ".join(f"{key} {value / GIB:.2f}" for key, value in parts.items())
        known = packing.positions.get(name)
        media = f"media unknown: {packing.lacks}" if known is None else f"{known:,} positions a step"
        lines.append(
            f"{name} {encoder.parameters / 1e9:.3f}B, {media}; GiB per rank: {sizes}, total {encoder.peak / GIB:.2f}"
        )
    return "\n".join(lines)


def _on_gpus(config: AnyRun, num_gpus: int | None) -> AnyRun:
    if num_gpus is None:
        return config
    if config.components is not None:
        raise InputError(f"--gpus {num_gpus}: components names the ranks of each component: change them there")
    return with_layout(config, _spread(config.parallel, num_gpus), config.memory)


def _spread(parallel: ParallelConfig, num_gpus: int) -> ParallelConfig:
    rest = parallel.pp * parallel.tp * parallel.cp * parallel.dp_replicate
    if num_gpus % rest:
        raise InputError(f"--gpus {num_gpus}: must be a multiple of parallel.pp x tp x cp x dp_replicate = {rest}")
    return parallel.model_copy(update={"dp_shard": num_gpus // rest})


_FSDP = {
    "keep": "weights stay gathered, and gradients are summed whole, until the end of a step",
    "reduce": "weights stay gathered until the end of a step, and gradients are summed in shards",
    "reshard": "each layer is gathered when it computes, and gradients are summed in shards",
}


def _tables(
    parallel: ParallelConfig, memory: MemoryConfig, step: StepPlan, packing: PlannedPacking, device: str, capacity: int
) -> str:
    lines = [
        f"{parallel.world_size} ranks of {device}: {parallel}",
        "mesh (pp, dp_replicate, fsdp, tp) = "
        f"({parallel.pp}, {parallel.dp_replicate}, {parallel.fsdp_size}, {parallel.tp})"
        + (
            f", experts (ep_shard, ep) = ({parallel.expert_ranks // parallel.ep}, {parallel.ep})"
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
        f"parallel.fsdp={parallel.fsdp}: {_FSDP[parallel.fsdp]}",
        f"memory.activation_checkpointing={memory.recomputed}, offload_optimizer={as_yaml(memory.offloads_optimizer)}",
        "",
        "GiB on the first rank of each pipeline rank",
        "rank  weights  moments  gathered  gradients  activations  buffers  head  backward   peak",
    ]
    for rank, of_rank in enumerate(step.ranks):
        parts = (
            (of_rank.weights, 7), (of_rank.moments, 7), (of_rank.gathered, 8), (of_rank.gradients, 9),
            (of_rank.activations, 11), (of_rank.buffers, 7), (of_rank.head, 4), (of_rank.backward, 8),
            (of_rank.peak, 5),
        )  # fmt: skip
        lines.append(f"{rank:4}  " + "  ".join(f"{value / GIB:{width}.2f}" for value, width in parts))
    efficiency = f"unknown: {packing.lacks}" if packing.efficiency is None else f"{packing.efficiency:.3f}"
    lines += [
        "",
        f"largest all-gather {step.largest_gather / GIB:.2f} GiB",
        *([f"activations in the host memory of a rank {step.host / GIB:.2f} GiB"] if step.host else []),
        f"microbatches of {capacity:,} tokens",
        f"{packing.microbatches} microbatches a step, {step.timeline.num_microbatches} microbatches on each data rank; "
        f"packing efficiency {efficiency}",
        f"bubble of the schedule {100 * step.timeline.bubble:.1f}% (stages weighed by their parameters)",
    ]
    return "\n".join(lines)


def _record(
    parallel: ParallelConfig, step: StepPlan, packing: PlannedPacking, device: str, fits: bool, others: list[str]
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
        "host_bytes": step.host,
        "microbatches": step.timeline.num_microbatches,
        "bubble": step.timeline.bubble,
        "packing": asdict(packing),
        "fits": fits,
        "would_fit": others,
    }
