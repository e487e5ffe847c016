"""Lays out a part without storage over ranks. This is the order in which forwards are replaced and wrapped:

1. expert parallelism cuts experts; their forward is ours by name (mixture/experts.py)
2. tensor parallelism cuts weights and sets the forwards of linear layers and embedding (parallel/tensor_parallel.py)
3. adapters set the forwards of their linear layers (lora/layers.py), or these become fp8 layers (model/float8.py)
4. the part and its head get a forward over microbatches (model/part_forward.py), norms a fused one
   (model/fused_norm.py)
5. routers follow routes and are watched (mixture/router_forward.py)
6. layers note their microbatch for adapters (lora/gate.py) and routers (mixture/microbatch_scope.py) and are recomputed
   in the backward (model/activation_checkpointing.py); they are compiled (model/compiled_layers.py) with their
   recomputation, those of a mixture without it
7. FSDP shards what is left and gathers it for the forward (parallel/sharding.py)

Before all that, frozen weights get the dtype in which they are used: nothing changes a master copy of them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PretrainedConfig

from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.families.family import Family
from automodel_rl.families.known import FAMILIES
from automodel_rl.lora.layers import install_adapters
from automodel_rl.mixture.experts import experts_of
from automodel_rl.mixture.microbatch_scope import MicrobatchScope
from automodel_rl.mixture.router_forward import install_router_forwards
from automodel_rl.mixture.router_replay import RouterReplay
from automodel_rl.mixture.routers import RouterWatch
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.compiled_layers import compile_layers
from automodel_rl.model.float8 import install_float8
from automodel_rl.model.fused_norm import install_fused_norms
from automodel_rl.model.linear_attention import (
    choose_rule,
    install_linear_attention,
    linear_attention_of,
)
from automodel_rl.model.part_forward import ForwardContext, install_part_forward, layers_of, numbered_layers
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import Unit, shard_parameter, wrap_fsdp
from automodel_rl.parallel.tensor_parallel import TensorParallel, split_part


def dtypes_of(model: ModelConfig) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which weights are gathered and used, and the one in which trained weights are kept and gradients
    reduced."""
    compute = getattr(torch, model.dtype)
    return compute, torch.promote_types(compute, torch.float32)


def mixed_precision(model: ModelConfig, least: torch.dtype = torch.bfloat16) -> MixedPrecisionPolicy:
    """How FSDP treats weights and gradients; inputs have the right dtype already.

    Args:
        model: the model's config.
        least: the dtype in which weights are gathered if the model's is narrower.
    """
    compute, master = dtypes_of(model)
    used = torch.promote_types(compute, least)
    return MixedPrecisionPolicy(param_dtype=used, reduce_dtype=master, cast_forward_inputs=False)


@dataclass(frozen=True)
class Extras:
    """What a step needs of a part besides its forward and backward.

    Attributes:
        microbatch_scope: shows which microbatch a layer computes.
        router_replay: makes the part's routers follow routes.
        router_watch: counts the load of the part's experts.
        partial_gradients: parameters, as (module, name), for which each tp rank's gradient is only a summand.
    """

    microbatch_scope: MicrobatchScope
    router_replay: RouterReplay
    router_watch: RouterWatch
    partial_gradients: list[tuple[nn.Module, str]]


def parallelise(part: Any, layout: Layout, model: ModelConfig, memory: MemoryConfig, num_deepstack: int = 0) -> Extras:
    """Lays out a causal language model, or a part of one, in place.

    Args:
        part: a model or a part of one, on the meta device except for its buffers.
        layout: this rank's place.
        model: the model's config: its precision, and how routers are trained.
        memory: what is recomputed or compiled.
        num_deepstack: number of first layers after which features of images are added.
    """
    family = FAMILIES[part.config.model_type]
    compute, _ = dtypes_of(model)
    compiled = memory.compile is True  # `auto` has been decided by ModelHandle.from_pretrained
    accurate_modules = _fp32_modules(part, family)
    store_frozen(part, compute, accurate_modules)
    how = TensorParallel(layout.tp_group, layout.parallel.sequence_parallel)
    partial: list[tuple[nn.Module, str]] = []
    experts = experts_of(part)
    for module in experts:
        _split_experts(module, layout)
    if layout.parallel.tp > 1:
        plan = family.whole_tp_plan(part.config.base_model_tp_plan)
        partial = split_part(part, plan, layout.mesh["tp"], how, family.scales_embedding)
    if linear_attention_of(part):
        install_linear_attention(part, how, choose_rule(layout.device, compute))
    gate = install_adapters(part)
    if model.fp8 is not None:
        install_float8(layers_of(part), model.fp8)
    install_part_forward(part, _context(part.config, family, layout, how, compiled, num_deepstack))
    if family.has_plain_norms:
        # A compiler fuses written-out norms with what is around them.
        install_fused_norms(part, layers_of(part) if compiled else [], layout.device, compute)
    scope = MicrobatchScope()
    sharing = [group for group in (layout.cp_group, layout.tp_group) if group is not None]
    watch = RouterWatch(numbered_layers(part), family, scope, model.moe, sharing)
    routers = watch.routers
    num_experts = max((router.num_experts for router in routers.values()), default=0)
    replay = RouterReplay(routers, num_experts, scope)
    install_router_forwards(routers.values())
    if model.lora is not None:
        gate.follow(layers_of(part))
    mixtures = {number: layer for number, layer in numbered_layers(part).items() if number in routers}
    if compiled and not mixtures:  # graphs hold their recomputation, which sees what is to be kept
        checkpoint_layers(layers_of(part), memory.recomputed)
        compile_layers(layers_of(part))
    else:
        if compiled:
            compile_layers(layers_of(part))
        scope.follow(mixtures)  # a recomputation must note the microbatch, too
        checkpoint_layers(layers_of(part), memory.recomputed)
    units = _fsdp_units(part, layout, model, accurate_modules, experts if layout.parallel.ep > 1 else [])
    wrap_fsdp(units, reshards=layout.parallel.reshards)
    return Extras(scope, replay, watch, partial)


def _context(
    config: PretrainedConfig,
    family: Family,
    layout: Layout,
    how: TensorParallel,
    compiled: bool,
    num_deepstack: int,
) -> ForwardContext:
    values = config.to_dict()
    return ForwardContext(
        how,
        layout.cp_group,
        family.rotary_by_layer_type,
        family.rotary_axes,
        values.get("final_logit_softcapping"),
        compiled=compiled,
        embedding_factor=values.get(family.embedding_factor, 1.0),
        logit_factor=values.get(family.logit_factor, 1.0) / values.get(family.logit_divisor, 1.0),
        num_deepstack=num_deepstack,
    )


def store_frozen(part: nn.Module, dtype: torch.dtype, accurate: Collection[nn.Module] = ()) -> None:
    """Gives frozen weights the dtype in which they are used, if it is narrower than theirs.

    Args:
        part: the part, on the meta device.
        dtype: the dtype in which the part computes.
        accurate: modules that compute in fp32 or wider.
    """
    kept = {parameter for module in accurate for parameter in module.parameters()}
    for parameter in part.parameters():
        if not parameter.requires_grad and parameter not in kept:
            parameter.data = parameter.data.to(dtype)


def _fsdp_units(
    part: Any, layout: Layout, model: ModelConfig, accurate: Collection[nn.Module], experts: Collection[nn.Module]
) -> list[Unit]:
    """The FSDP units of a part: modules of layers that have a precision or a mesh of their own, layers, embedding
    and head, and the rest."""
    mesh, policy = layout.fsdp_mesh, mixed_precision(model)
    units = [Unit(module, mesh, mixed_precision(model, least=torch.float32)) for module in accurate]
    units += [Unit(module, layout.expert_fsdp_mesh, policy) for module in experts]
    units += [Unit(layer, mesh, policy) for layer in layers_of(part)]
    embedding, head = part.model.embed_tokens, part.lm_head
    if embedding is None or head is None or embedding.weight is not head.weight:  # tied ones belong to the rest
        units += [] if embedding is None else [Unit(embedding, mesh, policy, is_first=True)]
        units += [] if head is None else [Unit(head, mesh, policy, is_last=True)]
    return [*units, Unit(part, mesh, policy)]


def _fp32_modules(part: Any, family: Family) -> list[nn.Module]:
    """The modules of a part's layers whose weights stay in fp32."""
    modules = (dict(layer.named_modules()).get(name) for layer in layers_of(part) for name in family.fp32_modules)
    return [module for module in modules if module is not None]


def _split_experts(module: Any, layout: Layout) -> None:
    """Leaves only this rank's experts in a module. `ep_group` has the ranks with the other experts, for its forward."""
    module.ep_group = None
    if layout.expert_mesh is not None:
        mesh = layout.expert_mesh["ep"]
        module.ep_group = mesh.get_group()
        for owner in list(module.modules()):  # also the adapters of experts
            for name, _ in list(owner.named_parameters(recurse=False)):
                shard_parameter(owner, name, mesh, dim=0)
