"""Lays out a part without storage over ranks, in `STEPS`."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PretrainedConfig

from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.compat.modules import pass_all_arguments
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.families.classifier import is_classifier
from automodel_rl.families.family import Family
from automodel_rl.families.known import FAMILIES, num_deepstack, padded_ids
from automodel_rl.lora.layers import install_adapters
from automodel_rl.lora.split import split_adapters
from automodel_rl.mixture.experts import experts_of
from automodel_rl.mixture.router_replay import RouterReplay
from automodel_rl.mixture.routers import RouterWatch, install_router_forwards, routers_of
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.compiled_layers import compile_layers
from automodel_rl.model.float8 import install_float8
from automodel_rl.model.fused_norm import install_fused_norms
from automodel_rl.model.indexer_loss import IndexerLoss
from automodel_rl.model.offloaded_activations import OffloadedActivations
from automodel_rl.model.part_forward import ForwardContext, install_part_forward, layers_of, numbered_layers
from automodel_rl.model.sparse_attention import install_indexers
from automodel_rl.model.tiled_mlp import tile_mlps
from automodel_rl.model.token_mixers.known import install_token_mixers
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import Unit, shard_parameter, wrap_fsdp
from automodel_rl.parallel.tensor_parallel import TensorParallel, split_part, styles_of
from automodel_rl.quantized.base import quantize_layers
from automodel_rl.quantized.formats import QuantizedFormat


class Dtypes(NamedTuple):
    """Dtypes of a model.

    Attributes:
        compute: weights as gathered and used.
        master: trained weights as stored.
        gradient: gradients as reduced and stored.
    """

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype


def dtypes_of(model: ModelConfig) -> Dtypes:
    compute = getattr(torch, model.dtype)
    wide = torch.promote_types(compute, torch.float32)
    return Dtypes(compute, wide if model.master_dtype == "auto" else getattr(torch, model.master_dtype), wide)


def mixed_precision(model: ModelConfig, least: torch.dtype = torch.bfloat16) -> MixedPrecisionPolicy:
    """Returns FSDP's precision policy. `least` is the narrowest dtype for gathered weights; inputs are not cast."""
    dtypes = dtypes_of(model)
    used = torch.promote_types(dtypes.compute, least)
    return MixedPrecisionPolicy(param_dtype=used, reduce_dtype=dtypes.gradient, cast_forward_inputs=False)


def layers_precision(model: ModelConfig) -> MixedPrecisionPolicy:
    """Returns the policy for decoder layers and encoders. With DoRA, weights are gathered as stored: frozen ones in
    the compute dtype, and adapters in fp32, because an error in a row's magnitude affects all tokens alike."""
    policy = mixed_precision(model)
    has_lengths = model.lora is not None and model.lora.dora
    return dataclasses.replace(policy, param_dtype=None) if has_lengths else policy


@dataclass(frozen=True)
class Extras:
    """What a step needs of a part besides forward and backward.

    Attributes:
        microbatch_scope: the microbatch that a layer currently computes.
        partial_gradients: parameters, as (module, name), whose gradient on each tp rank is only a summand.
        indexer_loss: None if indexers are frozen or absent.
    """

    microbatch_scope: MicrobatchScope
    router_replay: RouterReplay
    router_watch: RouterWatch
    partial_gradients: list[tuple[nn.Module, str]]
    indexer_loss: IndexerLoss | None


class PartInProgress:
    """A part being laid out, with the state shared by `STEPS`.

    Args:
        part: a model or a part of one, on the meta device except for its buffers.
        base: quantized formats of an adapters' base, by weight name in the model.

    Attributes:
        counts: whether layers accumulate something once per microbatch: expert loads or indexer losses.
    """

    def __init__(
        self,
        part: Any,
        layout: Layout,
        model: ModelConfig,
        memory: MemoryConfig,
        whole: PretrainedConfig,
        base: Mapping[str, QuantizedFormat],
    ):
        self.base = base
        self.part, self.layout, self.model, self.memory, self.whole = part, layout, model, memory, whole
        self.family, self.compute = FAMILIES[part.config.model_type], dtypes_of(model).compute
        self.compiled = memory.compile is True  # ModelHandle.load has resolved `auto`
        self.layers, self.experts = numbered_layers(part), experts_of(part)
        self.accurate = _fp32_modules(part, self.family)
        self.tp = TensorParallel(layout.tp_group, layout.parallel.sequence_parallel)
        self.partial: list[tuple[nn.Module, str]] = []
        self.counts = bool(routers_of(self.layers, self.family)) or model.indexer is not None
        self.scope = MicrobatchScope(tracks_first=self.counts)
        sharing = [group for group in (layout.cp_group, layout.tp_group) if group is not None]
        routed = {number: layer for number, layer in self.layers.items() if number < part.config.num_hidden_layers}
        self.watch = RouterWatch(routed, self.family, self.scope, model.moe, sharing)
        routers = self.watch.routers
        num_experts = max((router.num_experts for router in routers.values()), default=0)
        indexer = model.indexer
        self.indexer_loss = None if indexer is None else IndexerLoss(indexer.weight, self.scope, layout.parallel.tp)
        self.replay = RouterReplay(routers, num_experts, self.scope)


def choose_dtypes(work: PartInProgress) -> None:
    """Casts weights to the dtypes in which they are stored."""
    store_weights(work.part, dtypes_of(work.model), work.accurate)


def split_experts(work: PartInProgress) -> None:
    """Shards experts over ep. Their forward is registered under a name of ours (mixture/experts.py)."""
    for module in work.experts:
        _split_experts(module, work.layout)


def split_weights(work: PartInProgress) -> None:
    """Shards weights over tp, and replaces the forwards of linear layers and embedding."""
    if work.layout.parallel.tp > 1:
        plan = work.family.whole_tp_plan(work.part.config.base_model_tp_plan)
        mesh = work.layout.mesh["tp"]
        splits_head = not is_classifier(work.part.config)
        adapters = split_adapters(work.part, styles_of(plan), mesh, work.tp)
        partial = split_part(work.part, plan, mesh, work.tp, work.family.scales_embedding, splits_head, adapters)
        work.partial += [(module, key) for module, key in partial if module.get_parameter(key).requires_grad]


def replace_token_mixers(work: PartInProgress) -> None:
    """Replaces the forwards of layers that mix tokens other than by attention."""
    install_token_mixers([*work.layers.values()], work.family, work.tp, work.layout.device, work.compute)


def replace_indexers(work: PartInProgress) -> None:
    """Replaces the forwards of indexers."""
    install_indexers(work.layers.values(), work.family, work.indexer_loss)


def replace_layer_forwards(work: PartInProgress) -> None:
    """Replaces layer forwards that would not pass the microbatch to attention."""
    if not work.family.passes_all_arguments:
        pass_all_arguments(work.layers.values())


def quantize_base(work: PartInProgress) -> None:
    """Quantizes frozen linear layers and experts of decoder layers, if the base is to be quantized.

    Raises:
        InputError: this torch's FSDP cannot gather bytes.
    """
    if work.base:
        if work.layout.parallel.fsdp_size > 1 and TORCH < (2, 13):  # checked with 2.13; 2.11 casts them
            raise InputError(
                "a quantized base with parallel.dp_shard x cp of 2 or more: FSDP of this torch cannot gather bytes: "
                "use torch 2.13 or newer, base=plain, or parallel.pp"
            )
        quantize_layers(work.layers, work.base)


def add_float8_and_adapters(work: PartInProgress) -> None:
    """Converts linear layers to fp8, and replaces the forwards of those with adapters."""
    if work.model.fp8 is not None:
        install_float8(work.layers.values(), work.model.fp8)
    install_adapters(work.part, work.scope)


def compute_mlps_in_tiles(work: PartInProgress) -> None:
    """Tiles MLPs, if configured."""
    if work.memory.mlp_tile is not None:
        tile_mlps(work.layers.values(), work.memory.mlp_tile, work.compiled)


def replace_part_forward(work: PartInProgress) -> None:
    """Replaces the forwards of the part and its head by ones over microbatches."""
    install_part_forward(work.part, _context(work))


def fuse_norms(work: PartInProgress) -> None:
    """Fuses norms, except in compiled layers, where the compiler fuses them with their surroundings."""
    if work.family.has_plain_norms:
        compiled = work.layers.values() if work.compiled else ()
        install_fused_norms(work.part, compiled, work.layout.device, work.compute)


def watch_routers(work: PartInProgress) -> None:
    """Makes routers follow routes, and counts their choices."""
    install_router_forwards(work.watch.routers.values())


def compile_and_recompute(work: PartInProgress) -> None:
    """Compiles layers, adds recomputation, and tracks their microbatch for adapters and routers.

    Layers that count nothing are compiled together with their recomputation, whose policy then sees each operator,
    and are tracked around the graph. For layers that count, or have tiles, the graph is innermost: it cannot tell a
    first computation from a repeated one. Tracking wraps it, and recomputation, which sets the microbatch again,
    wraps both. Offloading is outermost.
    """
    layers = work.layers.values()
    in_graph = work.compiled and not work.counts and work.memory.mlp_tile is None
    if work.compiled and not in_graph:
        compile_layers(layers)
    if work.counts or work.model.lora is not None:
        work.scope.follow(work.layers)
    checkpoint_layers(layers, work.memory.recomputed, in_graph)
    if in_graph:
        compile_layers(layers)
        if work.model.lora is not None:
            work.scope.follow(work.layers)
    if work.memory.recomputed == "offload":
        OffloadedActivations(work.layout.device).install(layers)


def shard(work: PartInProgress) -> None:
    """Shards the remaining weights by FSDP, which gathers them for the forward."""
    wrap_fsdp(_fsdp_units(work), reshards=work.layout.parallel.reshards)


STEPS: tuple[Callable[[PartInProgress], None], ...] = (
    choose_dtypes,
    split_experts,
    split_weights,
    replace_token_mixers,
    replace_indexers,
    replace_layer_forwards,
    quantize_base,
    add_float8_and_adapters,
    compute_mlps_in_tiles,
    replace_part_forward,
    fuse_norms,
    watch_routers,
    compile_and_recompute,
    shard,
)
"""The steps in order: each works on the result of those before."""


def parallelise(
    part: Any,
    layout: Layout,
    model: ModelConfig,
    memory: MemoryConfig,
    whole: PretrainedConfig,
    base: Mapping[str, QuantizedFormat],
) -> Extras:
    """Lays out a causal language model, or a part of one, in place. The arguments are those of `PartInProgress`."""
    work = PartInProgress(part, layout, model, memory, whole, base)
    for step in STEPS:
        step(work)
    return Extras(work.scope, work.replay, work.watch, work.partial, work.indexer_loss)


def _context(work: PartInProgress) -> ForwardContext:
    values, family = work.part.config.to_dict(), work.family
    return ForwardContext(
        work.tp,
        work.layout.cp_group,
        family.rotary_by_layer_type,
        family.rotary_axes,
        values.get("final_logit_softcapping"),
        compiled=work.compiled,
        embedding_factor=family.factor_of_embeddings(values),
        logit_factor=values.get(family.logit_factor, 1.0) / values.get(family.logit_divisor, 1.0),
        num_deepstack=num_deepstack(work.whole),
        shares_kv=family.shares_kv,
        has_indexer=bool(family.index_rotary),
        carried_argument=family.carried_argument,
        mtp_kind=family.mtp_kinds[0] if family.rotary_by_layer_type else None,
        detaches_mtp=work.model.mtp is None or work.model.mtp.detached,
        has_layer_embeddings=bool(values.get("hidden_size_per_layer_input")),
        padded_ids=padded_ids(work.whole),
    )


def store_weights(part: nn.Module, dtypes: Dtypes, accurate: Collection[nn.Module] = ()) -> None:
    """Casts weights for storage: trained ones to the master dtype, frozen ones to the compute dtype, as they need no
    master copy. Those of `accurate` modules, which compute in fp32 or wider, are left alone."""
    kept = {parameter for module in accurate for parameter in module.parameters()}
    for parameter in part.parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(dtypes.master if parameter.requires_grad else dtypes.compute)


def _fsdp_units(work: PartInProgress) -> list[Unit]:
    """Returns a part's FSDP units: modules with their own precision or mesh, layers, embedding and head, and the
    rest."""
    part, layout, policy = work.part, work.layout, mixed_precision(work.model)
    mesh = layout.fsdp_mesh
    units = [Unit(module, mesh, mixed_precision(work.model, least=torch.float32)) for module in work.accurate]
    if layout.parallel.ep > 1:
        units += [Unit(module, layout.expert_fsdp_mesh, policy) for module in work.experts]
    of_layers = layers_precision(work.model)
    units += [Unit(layer, mesh, of_layers) for layer in work.layers.values()]
    # Gemma 4's per-layer embeddings are larger than everything else.
    units += [Unit(m, mesh, policy) for n, m in part.model.named_children() if n == "embed_tokens_per_layer"]
    embedding, head = part.model.embed_tokens, part.lm_head
    if embedding is None or head is None or embedding.weight is not head.weight:  # tied ones belong to the rest
        units += [] if embedding is None else [Unit(embedding, mesh, policy, is_first=True)]
        units += [] if head is None else [Unit(head, mesh, policy, is_last=True)]
    return [*units, Unit(part, mesh, policy)]


def _fp32_modules(part: Any, family: Family) -> list[nn.Module]:
    modules = (dict(layer.named_modules()).get(name) for layer in layers_of(part) for name in family.fp32_modules)
    return [module for module in modules if module is not None]


def _split_experts(module: Any, layout: Layout) -> None:
    """Keeps only this rank's experts of a module, and sets `ep_group` for its forward."""
    module.ep_group = None
    if layout.expert_mesh is not None:
        mesh = layout.expert_mesh["ep"]
        module.ep_group = mesh.get_group()
        for owner in list(module.modules()):  # also the adapters of experts
            for name, _ in list(owner.named_parameters(recurse=False)):
                shard_parameter(owner, name, mesh, dim=0)
