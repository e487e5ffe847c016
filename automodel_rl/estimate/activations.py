"""Activation memory of one layer, measured without a device by running forward and backward on meta tensors.

Stand-ins replace attention, norms and experts, and save as many bytes for the backward as the fused kernels do.

Compiled layers save less: elementwise operations are recomputed in the backward, unless a matrix product needs their
result. They never recompute attention.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.compat.modules import apply_gate
from automodel_rl.compat.operations import TorchDispatchMode, tensors_in
from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import RECOMPUTE_ALL, LoraConfig, Recomputed
from automodel_rl.estimate.parameter_sizes import causal_model
from automodel_rl.families.family import Family
from automodel_rl.families.known import FAMILIES
from automodel_rl.lora.add import add_adapters
from automodel_rl.lora.layers import adapted_layers, install_adapters
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.fused_norm import plain_norms
from automodel_rl.model.indexer_loss import AddGradients, IndexerLoss
from automodel_rl.model.sparse_attention import KeyIndex, install_indexers
from automodel_rl.model.tiled_mlp import mlps_of, tile_mlps
from automodel_rl.model.token_mixers.known import TOKEN_MIXERS, last_projection, set_decays_apart
from automodel_rl.parallel.tensor_parallel import TensorParallel
from automodel_rl.support.description import FULL, kinds_of_layers

STAND_IN = "automodel_rl_plan"
HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "swa_num_key_value_heads",
    "linear_num_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Config keys of numbers that tensor parallelism divides."""

META = torch.device("meta")


@dataclass(frozen=True)
class LayerActivations:
    """Bytes that a layer needs for one microbatch.

    Attributes:
        kept: bytes kept from its forward to its backward, excluding its input, which belongs to the previous layer.
        backward: peak additional bytes in its backward, including the gradients of its weights.
    """

    kept: int
    backward: int


@dataclass(frozen=True)
class LayerForward:
    """How a layer computes.

    Attributes:
        dtype: compute dtype.
        recomputed: see memory.activation_checkpointing.
        trains_indexer: whether its indexer, if any, is trained.
        mlp_tile: see memory.mlp_tile.
        lora: adapters of the model; None if there are none.
    """

    dtype: torch.dtype
    recomputed: Recomputed
    compiled: bool
    trains_indexer: bool = False
    mlp_tile: int | None = None
    lora: LoraConfig | None = None


def layer_activations(
    config: PretrainedConfig, layer: int, num_tokens: int, parallel: ParallelConfig, how: LayerForward
) -> LayerActivations:
    """Measures the bytes that a layer needs for `num_tokens` tokens on one rank."""
    dtype, mode, compiled = how.dtype, how.recomputed, how.compiled
    AttentionInterface.register(STAND_IN, functools.partial(attention_stand_in, parallel))
    ALL_EXPERTS_FUNCTIONS.register(STAND_IN, functools.partial(_experts, compiled))
    module, rotary = _one_layer(_of_one_rank(config, parallel), layer, parallel.ep, how, num_tokens)
    if compiled:
        _stand_in_elementwise(module)
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=META)
    microbatch = SimpleNamespace(restore=None, offsets=tokens, lengths=(num_tokens,), num_tokens=num_tokens)
    if how.mlp_tile is not None:
        tile_mlps([module], how.mlp_tile)
    checkpoint_layers([module], mode)
    hidden = torch.empty(1, num_tokens, config.hidden_size, dtype=dtype, device=META, requires_grad=True)
    with LiveBytes() as live:
        output = module(
            hidden,
            position_ids=tokens[None],
            position_embeddings=rotary,
            microbatch=microbatch,
            cp_group=None,
            **_further_arguments(config, num_tokens, dtype),
        )
        output = output[0] if isinstance(output, tuple) else output
        kept = live.now
        live.most = live.now
        output.backward(torch.empty_like(output))
    # Under sequence parallelism the tp ranks split the residual stream and the norms between blocks.
    between = 3 * num_tokens * config.hidden_size * dtype.itemsize if mode == "none" else 0
    spared = between * (parallel.tp - 1) // parallel.tp if parallel.sequence_parallel else 0
    # Recomputation discards the stand-in's output, but would keep the kernel's.
    attended = _attended(module, FAMILIES[config.model_type], num_tokens, dtype) if keeps_attention(config, how) else 0
    if compiled and mode == "selective":  # the output of the last matrix product is not needed again
        attended -= num_tokens * config.hidden_size * dtype.itemsize
    beside = num_tokens * dtype.itemsize * _beside_bases(module, how) if compiled else 0
    return LayerActivations(kept - spared + attended, live.most - kept + beside)


def _beside_bases(module: nn.Module, how: LayerForward) -> int:
    """Returns the additional values per token that a compiled layer with adapters needs while it is recomputed for its
    backward.

    The outputs of an adapter and of its base are added only where they are used, so both are held, as are both
    gradients of an MLP's inputs. Measured with torch 2.11: benchmarks/speed.md.
    """
    if how.recomputed not in RECOMPUTE_ALL:
        return 0
    of_mlps = {id(linear) for mlp in mlps_of(module) for linear in adapted_layers(mlp)}
    if how.mlp_tile is not None:
        return sum(linear.out_features for linear in adapted_layers(module) if id(linear) not in of_mlps)
    return sum(
        linear.out_features + (linear.in_features if id(linear) in of_mlps else 0) for linear in adapted_layers(module)
    )


def _further_arguments(config: PretrainedConfig, num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Returns additional layer arguments of a few families (model/part_forward.py)."""
    family = FAMILIES[config.model_type]
    found: dict[str, Any] = {"shared_kv_states": {}} if family.shares_kv else {}
    found["attention_mask"] = torch.empty(1, 1, 0, 0, device=META) if family.index_rotary else None
    if family.carried_argument:
        found[family.carried_argument] = torch.empty(0, device=META)
    if width := config.to_dict().get("hidden_size_per_layer_input"):
        found["per_layer_input"] = torch.empty(1, num_tokens, width, dtype=dtype, device=META)
    return found


def keeps_attention(config: PretrainedConfig, how: LayerForward) -> bool:
    """Whether a layer with recomputation keeps the output of attention.

    A compiled layer always does, since attention is a separate operator in its graph. The graphs of mixtures, and of
    layers with tiles, contain no recomputation.
    """
    in_graph = how.compiled and not FAMILIES[config.model_type].is_moe and how.mlp_tile is None
    return how.recomputed == "selective" or (how.recomputed in RECOMPUTE_ALL and in_graph)


def _attended(module: Any, family: Family, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of attention's output."""
    last = last_projection(module, family)
    return 0 if last is None else num_tokens * last.in_features * dtype.itemsize


def _of_one_rank(config: PretrainedConfig, parallel: ParallelConfig) -> PretrainedConfig:
    """Returns the config of a layer with the width of one tp rank's part."""
    values = config.to_dict()
    changed: dict[str, Any] = {}
    if parallel.tp > 1:
        changed["head_dim"] = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        of_experts = FAMILIES[config.model_type].is_moe and not values.get("moe_intermediate_size")
        split = [*HEADS, *(() if of_experts else ("intermediate_size",))]
        changed |= {key: values[key] // parallel.tp for key in split if values.get(key)}
    return type(config).from_dict({**values, **changed})


def _one_layer(
    config: PretrainedConfig, layer: int, ep: int, how: LayerForward, num_tokens: int
) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """Builds the layer on the meta device with stand-ins, and the rotary embedding of its tokens, if the model has
    any."""
    config, dtype = _first_layers(config, layer + 1), how.dtype
    with META:
        model = causal_model(config, dtype=dtype, attn_implementation=STAND_IN, experts_implementation=STAND_IN)
        if how.lora is not None:
            add_adapters(model, how.lora)
            install_adapters(model)
    module = model.model.layers[layer]
    family = FAMILIES[config.model_type]
    if family.has_square_output:
        heads = module.self_attn.q_proj.out_features  # of one rank
        module.self_attn.o_proj = nn.Linear(heads, config.hidden_size, bias=False, dtype=dtype, device=META)
    for experts in (part for name, part in module.named_modules() if name.endswith("experts")):
        for name, weight in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(weight[: len(weight) // ep]))
    set_decays_apart([module], family)
    loss = IndexerLoss(1.0, MicrobatchScope(), num_tp=1) if how.trains_indexer else None
    install_indexers([module], family, loss)
    if (mixer := TOKEN_MIXERS.get(family.token_mixer)) is not None:
        rule = _rule if mixer.has_kernels else mixer.choose_rule(META, dtype)
        mixer.install(module, TensorParallel(None, sequence_parallel=False), rule)
    if family.has_plain_norms:
        stand_in_norms(module)
    hidden = torch.empty(1, num_tokens, config.hidden_size, dtype=dtype, device=META)
    positions = torch.empty(1, num_tokens, dtype=torch.int64, device=META)
    if family.rotary_axes > 1:
        positions = positions.expand(family.rotary_axes, 1, -1)
    kind = [config.layer_types[layer]] if family.rotary_by_layer_type else []
    turn = model.model.rotary_emb  # none in a model without positions
    return module, None if turn is None else turn(hidden, positions, *kind)


def _first_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """Returns the config with as few layers as needed, since building a large model is slow.

    The last of them has full attention if the model has any: some classes require it, or modify the last layer.
    """
    values = config.to_dict()
    whole, kinds = config.num_hidden_layers, kinds_of_layers(config)
    while FULL in kinds and count < whole and kinds[count - 1] != FULL:
        count += 1
    by_layer = {key: of[:count] for key, of in values.items() if isinstance(of, list) and len(of) == whole}
    fewer = {"num_hidden_layers": count, **by_layer}
    if configs := values.get("per_layer_config"):
        fewer["per_layer_config"] = {key: of_layer for key, of_layer in configs.items() if int(key) < count}
    return type(config).from_dict({**values, **fewer})


def stand_in_norms(module: nn.Module) -> None:
    """Replaces the forward of norms (weight * x / rms(x)) by one that saves as much as the fused kernel."""
    for norm in plain_norms(module):
        norm.forward = MethodType(lambda norm, hidden: _Norm.apply(hidden, norm.weight), norm)


def _stand_in_elementwise(module: nn.Module) -> None:
    """Makes a layer save as much as a compiled one."""
    stand_in_norms(module)
    for name, part in module.named_modules():
        if name.endswith("act_fn"):
            part.forward = _InPlace.apply


class LiveBytes(TorchDispatchMode):
    """Tracks the current and peak bytes of live tensors created by operators."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._alive and id(storage) not in given:
                self._count(storage)
        return result

    def _count(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def freed(_: object) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


class _Norm(torch.autograd.Function):
    """A norm that saves its input and one number per token, like the fused kernel."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


class _InPlace(torch.autograd.Function):
    """An activation function that saves nothing but its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


class _Gate(torch.autograd.Function):
    """Activation and gate of experts, saving nothing but the input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


class _MeasuredAttention(torch.autograd.Function):
    """Attention that saves query, key, value, output and log-sum-exp; under context parallelism, the keys and values of
    both calls, or everything for its share of the heads."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parallel: ParallelConfig) -> Tensor:
        tokens = query.shape[2]
        output = query.new_empty(1, tokens, query.shape[1], value.shape[-1])
        logsumexp = query.new_empty(query.shape[1], tokens, dtype=torch.float32)
        ctx.shapes, ctx.gathered = (query.shape, key.shape, value.shape), None
        if parallel.cp == 1:
            ctx.save_for_backward(query, key, value, output, logsumexp)
            return output
        if not parallel.gathers_keys:
            ctx.save_for_backward(*map(torch.empty_like, (query, key, value)), output, logsumexp)
            return torch.empty_like(output)
        width = key.shape[1] * (key.shape[-1] + value.shape[-1])
        keys = key.new_empty(tokens * (2 * parallel.cp + 1) // 2, width)
        ctx.save_for_backward(torch.empty_like(query), keys, output, logsumexp)
        ctx.gathered = 2 * (keys.shape, (tokens * parallel.cp, width))
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients of both calls' keys and values, separate and concatenated, and of all tokens, which ranks exchange.
        whole = [gradients[0].new_empty(shape) for shape in ctx.gathered or ()]
        found = [gradients[0].new_empty(shape) for shape in ctx.shapes]
        del whole
        return *found, None


def attention_stand_in(
    parallel: ParallelConfig,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    indices: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' signature that saves as much as a fused kernel, and computes gradients of an indexer
    if it is trained."""
    output = _MeasuredAttention.apply(query, key, value, parallel)
    if isinstance(indices, KeyIndex) and indices.loss is not None:
        tensors = (indices.queries, indices.keys, indices.weights)
        output = AddGradients.apply(output, *tensors, *map(torch.empty_like, tensors))
    return output, None


class _Rule(torch.autograd.Function):
    """Kernels of a token mixer, which save their inputs and output."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        output = torch.empty_like(inputs[2])
        ctx.save_for_backward(*inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:-1])


def _rule(*arguments: Any) -> Tensor:
    """Stands in for the kernels of any token mixer, which take queries, keys, values, other tensors, and lengths."""
    return _Rule.apply(*arguments[:-1])


def _experts(compiled: bool, module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Creates the tensors of `experts_forward`, with a balanced load on the experts."""
    order = torch.empty(experts.numel(), dtype=torch.int64, device=META)
    slots = hidden[order]
    first = module.gate_up_proj if module.has_gate else module.up_proj
    up, down = (w[0] if module.is_transposed else w[0].t() for w in (first, module.down_proj))
    hidden = slots @ up
    if not module.has_gate:
        hidden = module.act_fn(hidden)
    else:
        hidden = _Gate.apply(hidden) if compiled else apply_gate(module, hidden)
    outputs = hidden @ down
    weighted = outputs * weights.flatten()[order, None]
    return weighted[order].view(*experts.shape, -1).sum(1).to(hidden.dtype)
