"""A part without storage, laid out over ranks: tensor parallel, experts, forwards, recomputation, FSDP, in order."""

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from automodel_rl.config.families import Family
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.config.model import MoEConfig
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.experts import experts_of
from automodel_rl.model.fused_norm import install_fused_norms
from automodel_rl.model.lora import install_adapters
from automodel_rl.model.part_forward import ForwardContext, install_part_forward, layers_of, numbered_layers
from automodel_rl.model.routers import RouterWatch
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import shard_parameter, wrap_fsdp
from automodel_rl.parallel.tensor_parallel import TensorParallel, split_part


def parallelise(
    part: Any,
    family: Family,
    layout: Layout,
    memory: MemoryConfig,
    moe: MoEConfig,
    compute: torch.dtype,
    master: torch.dtype,
) -> None:
    """Lays out a causal language model, or a part of one, in place.

    Args:
        part: on the meta device, but for its buffers.
        family: what is special about it.
        layout: this rank's place.
        memory: what is recomputed or compiled.
        moe: how routers are trained.
        compute: dtype in which weights are gathered.
        master: dtype in which they are kept and gradients reduced.
    """
    how = TensorParallel(layout.tp_group, layout.parallel.sequence_parallel)
    part.partial_gradients = []
    if layout.parallel.tp > 1:
        part.partial_gradients = split_part(
            part, part.config.base_model_tp_plan, layout.mesh["tp"], how, family.scales_embedding
        )
    experts = experts_of(part)
    for module in experts:
        _split_experts(module, layout)
    install_adapters(part)
    context = ForwardContext(
        how,
        layout.cp_group,
        family.rotary_by_layer_type,
        part.config.to_dict().get("final_logit_softcapping"),
    )
    install_part_forward(part, context)
    if family.has_plain_norms:
        install_fused_norms(part, layout.device, compute)
    part.router_watch = RouterWatch(numbered_layers(part), family, moe)
    if memory.compile:
        for layer in layers_of(part):
            layer.forward = torch.compile(layer.forward, dynamic=True)
    checkpoint_layers(layers_of(part), memory.activation_checkpointing)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False)
    own_units = experts if layout.parallel.ep > 1 else []
    wrap_fsdp(part, layers_of(part), own_units, layout.fsdp_mesh, layout.expert_fsdp_mesh, policy)


def _split_experts(module: Any, layout: Layout) -> None:
    """Leaves this rank's experts; `ep_group` tells the experts' forward where the others are."""
    module.ep_group = None
    if layout.expert_mesh is not None:
        mesh = layout.expert_mesh["ep"]
        module.ep_group = mesh.get_group()
        for name in list(module._parameters):
            shard_parameter(module, name, mesh, dim=0)
