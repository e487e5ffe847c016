"""Memory of every pipeline rank in a training step, from tensor sizes and the order of the schedule.

Counted in bytes, for the first rank of each FSDP group (no rank has more):
  weights        this rank's shards: master copies of trained weights, and frozen weights in the compute dtype
  moments        optimizer moments of the trained shards
  gathered       full weights in the compute dtype. parallel.fsdp=keep and reduce: all, from the first forward to the
                 end of the step, which saves all-gathers. reshard: those of the current and the next layer, twice, as
                 messages and as weights, and the head. Frozen weights that are not sharded are never gathered
  gradients      sums over microbatches in the gradient dtype. keep: unsharded, since they are reduced over ranks once
                 per step; with a single microbatch they are reduced at once, and only shards are kept. reduce, reshard:
                 shards
  activations    activations of microbatches between forward and backward, at the peak of the schedule
  buffers        messages between stages that this rank waits for; received activations count as activations
  reference      the reference policy's weights in the compute dtype, with memory.reference=device
One at a time, while activations are held:
  head           logits of one chunk, gradients of a group of chunks, and the sum of the head's gradients if it is not
                 among gradients, or the copy of this sum that is reduced
  backward       additional memory of one layer's backward, with the message that reduces the gradients of the head or
                 of the previous layer, or of the reduction of one layer's gradients
Once no activations are left:
  last           the message that reduces the gradients of the embedding
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from transformers import PretrainedConfig

from automodel_rl.block_sizes import block_sizes
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.estimate.activations import LayerActivations, LayerForward, keeps_attention, layer_activations
from automodel_rl.estimate.parameter_sizes import (
    ParameterSize,
    empty_parts,
    formats_of_base,
    parameter_sizes,
    stage_parameters,
)
from automodel_rl.families.known import language_config
from automodel_rl.model.compiled_layers import are_compiled
from automodel_rl.model.offloaded_activations import ON_DEVICE
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.parallel.pipeline.schedules import SCHEDULES, stages_of_ranks
from automodel_rl.parallel.pipeline.split import layers_per_stage
from automodel_rl.parallel.pipeline.timeline import Timeline, simulate
from automodel_rl.quantized.formats import FORMATS
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import describe_model, experts_per_token, kinds_of_layers

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank, by the parts described at the top of this file.

    Attributes:
        shards_at_once: whether gradients are reduced layer by layer while activations are freed, as with one
            microbatch.
        frees_gathered: whether gathered weights are also freed layer by layer, rather than at the end of the step.
        optimizer: weights, moments and reduced gradients in the optimizer step if moments are offloaded.
    """

    weights: int
    moments: int
    gathered: int
    gradients: int
    activations: int
    buffers: int
    head: int
    backward: int
    shards_at_once: bool = False
    frees_gathered: bool = False
    optimizer: int = 0
    reference: int = 0
    last: int = 0

    @property
    def peak(self) -> int:
        """Peak memory. With one microbatch, gradients replace activations and gathered weights."""
        lasting = self.weights + self.moments + self.buffers + (0 if self.frees_gathered else self.gathered)
        both = (self.gradients, self.activations + (self.gathered if self.frees_gathered else 0))
        in_backward = (max(both) if self.shards_at_once else sum(both)) + max(self.head, self.backward)
        return self.reference + max(self.optimizer, lasting + max(in_backward, self.gradients + self.last))


@dataclass(frozen=True)
class StepPlan:
    """The plan of one training step on a layout.

    Attributes:
        layers: number of layers of each stage.
        stage_weights: number of parameters of each stage, before any sharding.
        ranks: memory of each pipeline rank.
        largest_gather: bytes of the largest all-gather.
        timeline: the schedule's timeline, with stages weighted by their work.
        host: bytes of activations in host memory on the fullest rank.
    """

    layers: tuple[int, ...]
    stage_weights: tuple[int, ...]
    ranks: tuple[RankMemory, ...]
    largest_gather: int
    timeline: Timeline
    host: int

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(rank.peak for rank in self.ranks)


class MemoryModel:
    """Plans layouts for a model. Everything that depends on the model alone is computed once.

    Args:
        whole: config of the whole model. Of a multimodal model, only the language model is planned.
        model: config section with precision and adapters.
        microbatch_tokens: microbatch capacity in tokens.
        optimizer: config of the optimizer.

    Attributes:
        parameters: number of parameters.
        active_parameters: number of parameters used per token.
        values: the config as a dictionary.
    """

    def __init__(
        self,
        whole: PretrainedConfig,
        model: ModelConfig,
        microbatch_tokens: int,
        optimizer: OptimizerConfig,
    ):
        self.config, self.microbatch_tokens = (config := language_config(whole)), microbatch_tokens
        self._description, self._model_config = describe_model(whole), model
        self.values = config.to_dict()
        self._dtype, master, gradient = dtypes_of(model)
        self.compute, self.master, self.gradient = self._dtype.itemsize, master.itemsize, gradient.itemsize
        self._model = empty_parts(whole, gradient, model)[0]
        self.trains_head = self._model.lm_head.weight.requires_grad
        states = OPTIMIZERS[optimizer.name].state_names(self._model)
        shapes = {name: p.shape for name, p in self._model.named_parameters(remove_duplicate=False)}
        self._moment_bytes = {name: names.value_bytes(gradient, shapes[name]) for name, names in states.items()}
        self._base = formats_of_base(self._model, model.lora, self._description.quantization)
        # In a pipeline a tied head has a separate weight.
        self._whole = list(parameter_sizes(self._model, ParallelConfig(pp=2), self._base))
        self.parameters = sum(size.gathered for size in self._whole)
        frozen = [size for size in self._whole if not size.is_trained]
        num_frozen = max(sum(size.gathered for size in frozen), 1)
        self._frozen = sum(size.gathered * self._kept(size) for size in frozen) / num_frozen
        trained = [size for size in self._whole if size.is_trained]
        num_trained = sum(size.gathered for size in trained)
        self._trained_share = num_trained / self.parameters
        of_moments = sum(size.gathered * self._moment_bytes.get(size.name, 0.0) for size in trained)
        self._mean_moment_bytes = of_moments / max(num_trained, 1)
        self.active_parameters = sum(_active(size, config) for size in self._whole)
        self._activations: Callable[..., LayerActivations] = cache(partial(layer_activations, config))

    def with_microbatches_of(self, num_tokens: int) -> "MemoryModel":
        """Returns the same model with another microbatch capacity."""
        other = copy.copy(self)
        other.microbatch_tokens = num_tokens
        return other

    def copy_bytes(self, step: "StepPlan", adapters_alone: bool) -> int:
        """Bytes of a generator's full copy of the model, with the trainer's base if it receives adapters alone."""
        plain = sum(step.stage_weights) * self.compute
        spared = sum(size.gathered * (self.compute - self._kept(size)) for size in self._whole)
        return plain - round(spared) if adapters_alone else plain

    def least(self, parallel: ParallelConfig, memory: MemoryConfig) -> float:
        """Lower bound of a rank's bytes for weights, moments and accumulated gradients."""
        whole = self.parameters / (parallel.pp * parallel.tp * parallel.ep)
        trained, sharded = self._trained_share * whole, parallel.expert_ranks / parallel.ep
        moments = 0.0 if memory.offloads_optimizer else trained * self._mean_moment_bytes
        shards = (trained * self.master + moments + (whole - trained) * self._frozen) / sharded
        gathered = 0.0 if parallel.reshards else trained * self.compute
        gathered += (whole - trained) * self._frozen if sharded > 1 and not parallel.reshards else 0.0
        gradients = trained / sharded if parallel.reduces_each else trained
        return gathered + shards + gradients * self.gradient

    def min_activations(self, parallel: ParallelConfig, memory: MemoryConfig) -> float:
        """Lower bound of the bytes for activations of several microbatches on the fullest rank of a supported layout.
        The first rank of a pipeline holds those of as many microbatches as there are ranks."""
        how, layers = self._how(parallel, memory), self.config.num_hidden_layers
        kept = min(self._of_layer(layer, parallel, how).kept for layer in (0, layers - 1))  # kinds of layers may differ
        if memory.recomputed == "offload":
            return ON_DEVICE * kept
        return kept * (layers // parallel.pp if SCHEDULES[parallel.schedule].is_v else layers)

    def plan(self, parallel: ParallelConfig, memory: MemoryConfig, num_microbatches: int) -> StepPlan:
        """Plans a step on one layout, with `num_microbatches` on each data rank."""
        layers = layers_per_stage(self.config.num_hidden_layers, parallel)
        stages = stage_parameters(list(parameter_sizes(self._model, parallel, self._base)), layers)
        how = self._how(parallel, memory)
        of_layer = [self._of_layer(layer, parallel, how) for layer in range(self.config.num_hidden_layers)]
        ends = list(itertools.accumulate(layers))
        kept = [
            float(sum(a.kept for a in of_layer[end - count : end])) for count, end in zip(layers, ends, strict=True)
        ]
        held = [float(self._message(parallel) if stage else 0) for stage in range(len(layers))]
        if self._model_config.mtp is not None:  # a layer like the last one, and tensors [t, H] around it:
            # embeddings, two that are concatenated, and final states of model and layer with gradients of both
            kept[-1] += of_layer[-1].kept
            held[-1] += 7 * self._message(parallel) // 2
        offloads = memory.recomputed == "offload"
        if not offloads:
            held = [sum(of_stage) for of_stage in zip(held, kept, strict=True)]
        whole = stage_parameters(self._whole, layers)
        work = [float(sum(_active(size, self.config) for size in stage)) for stage in whole]
        timeline = simulate(parallel, num_microbatches, work, held)
        most_backward = max(a.backward for a in of_layer)
        if offloads:
            most_backward += ON_DEVICE * max(a.kept for a in of_layer)
        ranks = tuple(
            self._rank(rank, stages, timeline, parallel, memory, most_backward) for rank in range(parallel.pp)
        )
        return StepPlan(
            layers=layers,
            stage_weights=tuple(sum(size.gathered for size in stage) for stage in whole),
            ranks=ranks,
            largest_gather=max(_largest(_units(stage)) for stage in stages) * self.compute,
            timeline=timeline,
            host=round(max(simulate(parallel, num_microbatches, work, kept).max_held)) if offloads else 0,
        )

    def _rank(
        self,
        rank: int,
        all_stages: list[list[ParameterSize]],
        timeline: Timeline,
        parallel: ParallelConfig,
        memory: MemoryConfig,
        most_backward: int,
    ) -> RankMemory:
        indices = stages_of_ranks(parallel)[rank]
        stages = [all_stages[index] for index in indices]
        sizes = [size for stage in stages for size in stage]
        trained = [size for size in sizes if size.is_trained]
        trained_shards = sum(size.largest_shard for size in trained)
        frozen = sum(size.largest_shard * self._kept(size) for size in sizes if not size.is_trained)
        weights = trained_shards * self.master + round(frozen)
        moments = round(sum(size.largest_shard * self._moment_bytes.get(size.name, 0.0) for size in trained))
        units = [_units(stage, lambda size: size.gathered if size.is_trained else 0) for stage in stages]
        layer = max(_largest_layer(of_stage) for of_stage in units)
        reduction = 2 * layer * self.gradient if parallel.pp == 1 or parallel.reduces_each else 0
        has_head = parallel.num_stages - 1 in indices
        head = self.config.vocab_size // parallel.tp * self.config.hidden_size if self.trains_head and has_head else 0
        plain = self.compute * max((size.gathered for size in sizes if size.kept_in), default=0)  # one at a time
        messages = head * self.gradient + layer * (self.gradient + self.compute) if parallel.reduces_each else 0
        adds_up = timeline.num_microbatches > 1 or parallel.pp > 1
        sums_whole = adds_up and not parallel.reduces_each
        offloads = memory.offloads_optimizer
        return RankMemory(
            weights=weights,
            moments=0 if offloads else moments,
            gathered=self._gathered(stages, parallel),
            gradients=sum(size.gathered for size in trained) * self.gradient
            if sums_whole
            else trained_shards * self.gradient,
            activations=round(timeline.max_held[rank]),
            buffers=self._buffers(indices, parallel),
            head=self._head(parallel, head, sums_whole) if has_head else 0,
            backward=max(most_backward + plain + messages, reduction),
            shards_at_once=not adds_up,
            frees_gathered=not adds_up and not parallel.reshards,
            optimizer=weights + moments + trained_shards * self.gradient if offloads else 0,
            reference=trained_shards * self.compute if memory.reference == "device" else 0,
            last=max(map(_largest, units)) * self.gradient,
        )

    def _gathered(self, stages: list[list[ParameterSize]], parallel: ParallelConfig) -> int:
        """Bytes of gathered weights."""
        if not parallel.reshards:
            return sum(self._gathered_bytes(size) for stage in stages for size in stage)
        units = [_units(stage, self._gathered_bytes) for stage in stages]
        tied = max(of_stage.get((None, ""), 0) for of_stage in units)
        return 4 * max(map(_largest_layer, units)) + tied

    def _gathered_bytes(self, size: ParameterSize) -> int:
        """Bytes of the gathered copy of a parameter."""
        return round(size.gathered * self._kept(size)) if size.is_gathered else 0

    def _kept(self, size: ParameterSize) -> float:
        """Bytes per value of a parameter as layers use it."""
        return FORMATS[size.kept_in].value_bytes if size.kept_in else self.compute

    def _message(self, parallel: ParallelConfig) -> int:
        """Bytes of a message between stages, including the embeddings of next tokens if the MTP layer is trained."""
        tokens = self._tokens(parallel) // (parallel.tp if parallel.sequence_parallel else 1)
        copies = 1 if self._model_config.mtp is None else 2
        return copies * tokens * self.config.hidden_size * self.compute

    def _buffers(self, indices: Sequence[int], parallel: ParallelConfig) -> int:
        """Bytes of receive buffers: for the current and the next gradient, and for the next activation. Buffers in use
        until a backward count as activations."""
        received = sum((stage > 0) + 2 * (stage < parallel.num_stages - 1) for stage in indices)
        return received * self._message(parallel)

    def _head(self, parallel: ParallelConfig, trained: int, sums_whole: bool) -> int:
        """Peak bytes while the head computes, or its gradients are reduced. `trained` is the number of its trained
        parameters on a rank; `sums_whole` whether their gradient sum is already counted among the gradients of a
        step."""
        vocab, hidden, tokens = self.config.vocab_size // parallel.tp, self.config.hidden_size, self._tokens(parallel)
        logits = min(block_sizes.head_bytes, tokens * vocab * self.gradient)
        of_logits = min(block_sizes.head_group * logits, tokens * vocab * self.gradient) * self.compute // self.gradient
        states = 4 * tokens * hidden * self.compute  # the final norm's inputs and outputs, and their gradients
        gathered = 2 * vocab * hidden * self.compute if parallel.reshards and parallel.fsdp_size > 1 else 0
        own_sum = 0 if sums_whole else trained * self.gradient
        reduction = trained * self.gradient if parallel.pp == 1 or parallel.reduces_each else 0
        return own_sum + max(logits + of_logits + states + gathered, reduction)

    def _tokens(self, parallel: ParallelConfig) -> int:
        return -(-self.microbatch_tokens // parallel.cp)

    def _of_layer(self, layer: int, parallel: ParallelConfig, how: LayerForward) -> LayerActivations:
        """Memory of a layer. Layers of the same kind are measured once."""
        first_mixture = self.values.get("first_k_dense_replace") or 0
        types = kinds_of_layers(self.config) or [""] * (layer + 1)
        kinds = [(number >= first_mixture, kind) for number, kind in enumerate(types)]
        like = kinds.index(kinds[layer])
        axes = ParallelConfig(
            cp=parallel.cp,
            cp_exchange=parallel.cp_exchange,
            tp=parallel.tp,
            ep=parallel.ep,
            sequence_parallel=parallel.sequence_parallel,
        )
        return self._activations(like, self._tokens(parallel), axes, how)

    def recomputes_attention(self, parallel: ParallelConfig, memory: MemoryConfig) -> bool:
        """Whether attention is recomputed in the backward."""
        how = self._how(parallel, memory)
        return how.recomputed != "none" and not keeps_attention(self.config, how)

    def _how(self, parallel: ParallelConfig, memory: MemoryConfig) -> LayerForward:
        """Returns how layers compute on CUDA."""
        combination = Combination(self._description, self._model_config, parallel, memory)
        compiled = are_compiled(combination, torch.device("cuda"), self._dtype)
        trains_indexer = self._model_config.indexer is not None
        lora = self._model_config.lora
        return LayerForward(self._dtype, memory.recomputed, compiled, trains_indexer, memory.mlp_tile, lora)


def _units(
    stage: list[ParameterSize], measure: Callable[[ParameterSize], int] = lambda size: size.gathered
) -> dict[tuple[int | None, str], int]:
    """Sums a measure, by default gathered elements, over each FSDP unit: each layer, its experts if they are a separate
    unit, embedding and head if they are not tied, and the rest."""
    units: dict[tuple[int | None, str], int] = {}
    layer_fsdp = max(size.fsdp_size for size in stage)
    is_untied = HEAD in (size.name for size in stage)
    for size in stage:
        own = size.name if is_untied and size.name in (HEAD, EMBEDDING) else ""
        unit = (size.layer, "experts" if size.fsdp_size != layer_fsdp else own)
        units[unit] = units.get(unit, 0) + measure(size)
    return units


def _largest(units: dict[tuple[int | None, str], int]) -> int:
    return max(units.values(), default=0)


def _largest_layer(units: dict[tuple[int | None, str], int]) -> int:
    return _largest({unit: elements for unit, elements in units.items() if unit[0] is not None})


def _active(size: ParameterSize, config: PretrainedConfig) -> float:
    """Number of a parameter's weights that are used per token."""
    if size.name.startswith("model.embed_tokens"):
        return 0.0
    if ".experts." in size.name:
        return size.gathered * experts_per_token(config) / size.shape[0]
    return float(size.gathered)
