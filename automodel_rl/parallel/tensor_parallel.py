"""Tensor parallelism: a part's attention heads, MLP columns and vocabulary split over ranks.

It follows Megatron-LM (Shoeybi et al., arXiv:1909.08053) and, for sequence parallelism, Korthikanti et al.
(arXiv:2205.05198), with the layers in transformers' own plan for the model. Weights are DTensors, for FSDP,
checkpoints and exports; computation uses plain local tensors with explicit collectives.
"""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_rl.parallel.collectives import AllGatherCP, CopyToTP, ScatterSum, SumFromTP
from automodel_rl.parallel.sharding import local_tensor, shard_parameter

COLUMNS, ROWS, REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Supported styles of transformers' plans. REPLICATED: the same weight on all ranks, applied to different heads."""

BY_HEADS = "by_heads"
"""A norm, or a parameter such as sinks, with one entry per head in its first dim."""

WIDE_NORM = "wide_norm"
"""An RMSNorm over all heads of a token."""

FUSED, FUSED_HEADS, FUSED_STATES = "fused_columns", "fused_heads", "fused_states"
FUSED_THREE, FUSED_CHANNELS, FUSED_STATE_SPACE = "fused_three", "fused_channels", "fused_state_space"
"""Linear layers with fused outputs: two halves; queries, keys and values of attention, or of linear attention; an
encoder's queries, keys and values, with equally many heads; three per channel; or a state space's gates, values,
keys, queries and steps. Every rank keeps the whole weight, since files hold it as one tensor, and uses its rows of
each section."""


@dataclass(frozen=True)
class Sections:
    """Sections of rows that are shared out over ranks.

    Attributes:
        rows: number of rows of each section.
        shared: indices of sections that every rank has whole.
    """

    rows: tuple[int, ...]
    shared: tuple[int, ...] = ()

    def within(self, start: int, stop: int) -> "Sections":
        """Returns the sections from `start` up to, but not including, `stop`."""
        return Sections(self.rows[start:stop], tuple(n - start for n in self.shared if start <= n < stop))

    def of_rank(self, size: int) -> "Sections":
        """Returns the sections of one of `size` ranks."""
        rows = (count if n in self.shared else count // size for n, count in enumerate(self.rows))
        return Sections(tuple(rows), self.shared)


@dataclass(frozen=True)
class TensorParallel:
    """How a rank enters and leaves the split blocks of a layer; without a group, the identity.

    Attributes:
        sequence_parallel: whether ranks keep [1, t / tp, H] instead of [1, t, H] between blocks.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool

    def enter(self, hidden: Tensor) -> Tensor:
        """Turns hidden states between blocks into whole ones, [1, t, H]."""
        if self.group is None:
            return hidden
        if self.sequence_parallel:
            return AllGatherCP.apply(hidden.squeeze(0), self.group, "sum").unsqueeze(0)
        return CopyToTP.apply(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Turns the rank's summand [1, t, H] into hidden states between blocks."""
        if self.group is None:
            return partial
        if self.sequence_parallel:
            return ScatterSum.apply(partial, self.group)
        return SumFromTP.apply(partial, self.group)


def split_part(
    part: Any,
    plan: dict[str, str],
    mesh: DeviceMesh,
    how: TensorParallel,
    scales_embedding: bool,
    splits_head: bool,
    partial_adapters: Sequence[tuple[nn.Module, str]] = (),
) -> list[tuple[nn.Module, str]]:
    """Splits a part's layers, embedding and head, still without storage, and replaces their forwards.

    Args:
        plan: pattern of a module's or parameter's name below `model` -> style.
        scales_embedding: whether the embedding multiplies by its `embed_scale`.
        splits_head: whether the head is the vocabulary's. A linear one stays whole, and ranks share its gradient.
        partial_adapters: whole adapters, as (module, name), whose gradient on each rank is only a summand.

    Returns:
        Parameters, as (module, name), whose gradient on each rank is only a summand.
    """
    partial = split_linears(part, styles_of(plan), mesh, how, partial_adapters)
    if part.model.embed_tokens is not None:
        _shard(part.model.embed_tokens, mesh, dim=0, bias_dim=None)
        part.model.embed_tokens.forward = MethodType(_embedding_forward(how, scales_embedding), part.model.embed_tokens)
    if part.lm_head is not None and not splits_head:
        partial.append((part.lm_head, "weight"))
    elif part.lm_head is not None:
        if part.model.embed_tokens is not None and part.config.tie_word_embeddings:
            part.lm_head.weight = part.model.embed_tokens.weight
        else:
            _shard(part.lm_head, mesh, dim=0, bias_dim=None)
    if how.sequence_parallel:
        partial = [
            (module, key)
            for module in part.modules()
            for key, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, DTensor)
        ]
    return partial


def styles_of(plan: dict[str, str]) -> Callable[[str], str | None]:
    """Returns a function from a name in a part to its style in the plan; None if it is not split."""
    return lambda name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("model.")))


def split_linears(
    part: nn.Module,
    style_of: Callable[[str], str | None],
    mesh: DeviceMesh,
    how: TensorParallel,
    partial_adapters: Sequence[tuple[nn.Module, str]] = (),
) -> list[tuple[nn.Module, str]]:
    """Splits linear layers, still without storage, and replaces their forwards.

    Args:
        style_of: returns the style of a module by its name in the part; None if it is not split.

    Returns:
        Parameters, as (module, name), whose gradient on each rank is only a summand.
    """
    assert how.group is not None
    partial = [*partial_adapters]
    whole: set[nn.Parameter] = set()
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name, module in list(part.named_modules()):
        style = style_of(name)
        forward: Any = None
        if style in (COLUMNS, *SECTIONS):
            block = part.get_submodule(name.rpartition(".")[0])
            blocks[id(block)] = name, block
        if style == COLUMNS:
            _shard(module, mesh, dim=0, bias_dim=0)
            forward = _columns_forward
        elif style == ROWS:
            _shard(module, mesh, dim=1, bias_dim=None)
            forward = _rows_forward(how)
            whole.update(parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
        elif style in SECTIONS:
            forward = _sections_forward(how.group, SECTIONS[style](module, block, mesh.size()))
        elif style == BY_HEADS:
            _shard(module, mesh, dim=0, bias_dim=None)
            forward = _own_weight_forward
        elif style == WIDE_NORM:
            _shard(module, mesh, dim=0, bias_dim=None)
            forward = _wide_norm_forward(how.group)
        if forward is not None:
            module.forward = MethodType(forward, module)
        if style in (COLUMNS, ROWS, *SECTIONS):
            module.product = MethodType(_plain_product, module)
        if style in (REPLICATED, *SECTIONS) and not how.sequence_parallel:
            partial += [(module, key) for key, _ in module.named_parameters()]
    for name, _ in list(part.named_parameters()):
        if style_of(name) == BY_HEADS:
            owner, _, key = name.rpartition(".")
            shard_parameter(part.get_submodule(owner), key, mesh, dim=0)
    for name, block in blocks.values():
        if not how.sequence_parallel:
            _check_styles(name, block, whole | {module.get_parameter(key) for module, key in partial})
        block.register_forward_pre_hook(_enter(how), with_kwargs=True)
    return partial


def _check_styles(name: str, block: nn.Module, known: set[nn.Parameter]) -> None:
    """Raises RuntimeError unless every parameter of a split block is split or known to be whole: one missing from the
    plan would get only part of its gradient."""
    for key, parameter in block.named_parameters():
        if not isinstance(parameter, DTensor) and parameter not in known:
            raise RuntimeError(
                f"the block of {name} is split over tp, but no plan says how {key} is: add it to the plan"
            )


def _shard(module: nn.Module, mesh: DeviceMesh, dim: int, bias_dim: int | None) -> None:
    shard_parameter(module, "weight", mesh, dim)
    if bias_dim is not None:
        shard_parameter(module, "bias", mesh, bias_dim)


def _enter(how: TensorParallel) -> Any:
    def hook(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": how.enter(kwargs["hidden_states"])}
        return (how.enter(args[0]), *args[1:]), kwargs

    return hook


Part = Callable[[Tensor], Tensor]
"""Returns a rank's part of a tensor."""


def _plain_product(linear: nn.Linear, hidden: Tensor, bias: Tensor | None = None, own: Part = local_tensor) -> Tensor:
    """Multiplies tokens by a rank's part of the weight. Quantized weights use another product (quantized/linear.py)."""
    return F.linear(hidden, own(linear.weight), bias)


def _columns_forward(linear: Any, hidden: Tensor) -> Tensor:
    return linear.product(hidden, None if linear.bias is None else local_tensor(linear.bias))


def _rows_forward(how: TensorParallel) -> Any:
    def forward(linear: Any, hidden: Tensor) -> Tensor:
        output = how.leave(linear.product(hidden))
        return output if linear.bias is None else output + linear.bias

    return forward


def _halves(linear: Any, _: nn.Module, __: int) -> Sections:
    return Sections((len(linear.weight) // 2,) * 2)


def _sections_of_channels(linear: Any, _: nn.Module, __: int) -> Sections:
    return Sections((len(linear.weight) // 3,) * 3)


def _sections_of_states(_: nn.Module, linear_attention: Any, __: int) -> Sections:
    """Rows of queries, keys and values of linear attention."""
    return Sections((linear_attention.key_dim, linear_attention.key_dim, linear_attention.value_dim))


def sections_of_state_space(state_space: Any, tp: int) -> Sections:
    """Returns the rows of a state space's gates, values, keys, queries and steps. Heads share keys and queries in
    groups; if `tp` does not divide the groups, every rank has all."""
    width, states = state_space.intermediate_size, state_space.n_groups * state_space.ssm_state_size
    shared = () if state_space.n_groups % tp == 0 else (2, 3)
    return Sections((width, width, states, states, state_space.num_heads), shared)


def _sections_of_heads(_: nn.Module, attention: Any, tp: int) -> Sections:
    """Rows of queries, keys and values. Also sets a rank's head counts on the block, which splits by them."""
    queries, keys = (
        count * attention.head_dim for count in (attention.config.num_attention_heads, attention.num_key_value_heads)
    )
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= tp
    attention.num_key_value_heads //= tp
    return Sections((queries, keys, keys))


def _thirds(linear: Any, attention: Any, tp: int) -> Sections:
    """Rows of an encoder's queries, keys and values. Also sets a rank's head count on its attention."""
    attention.num_heads //= tp
    return Sections((len(linear.weight) // 3,) * 3)


SECTIONS = {
    FUSED: _halves,
    FUSED_HEADS: _sections_of_heads,
    FUSED_STATES: _sections_of_states,
    FUSED_THREE: _thirds,
    FUSED_CHANNELS: _sections_of_channels,
    FUSED_STATE_SPACE: lambda _, state_space, tp: sections_of_state_space(state_space, tp),
}
"""The sections, by style."""


def own_rows(whole: Tensor, sections: Sections, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's rows of each section of a tensor that is whole on every rank."""
    pieces = enumerate(whole.split(sections.rows))
    own = [p if n in sections.shared else p.chunk(group.size())[group.rank()] for n, p in pieces]
    return torch.cat(own)


def _sections_forward(group: dist.ProcessGroup, sections: Sections) -> Any:
    def forward(linear: Any, hidden: Tensor) -> Tensor:
        own = functools.partial(own_rows, sections=sections, group=group)
        return linear.product(hidden, None if linear.bias is None else own(linear.bias), own)

    return forward


def _own_weight_forward(norm: Any, *inputs: Tensor) -> Tensor:
    """The norm's own forward with this rank's weights."""
    return type(norm).forward(SimpleNamespace(**{**vars(norm), "weight": local_tensor(norm.weight)}), *inputs)


def _wide_norm_forward(group: dist.ProcessGroup) -> Any:
    """RMSNorm over split columns: squares are summed over ranks in fp32, as in transformers. A gate multiplies
    first."""

    def forward(norm: Any, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = hidden.to(torch.float32)
        if gate is not None:
            wide = wide * F.silu(gate.to(torch.float32))
        squares = SumFromTP.apply(wide.pow(2).sum(-1, keepdim=True), group)
        mean = CopyToTP.apply(squares, group) / (hidden.shape[-1] * group.size())
        wide = wide * torch.rsqrt(mean + norm.variance_epsilon)
        return (local_tensor(norm.weight) * wide).to(hidden.dtype)

    return forward


def _embedding_forward(how: TensorParallel, scales: bool) -> Any:
    def forward(embedding: Any, input_ids: Tensor) -> Tensor:
        assert how.group is not None
        weight = local_tensor(embedding.weight)
        places = input_ids - how.group.rank() * len(weight)
        own = (places >= 0) & (places < len(weight))
        # As in nn.Embedding, the padding token gets no gradient.
        trained = own if embedding.padding_idx is None else own & (input_ids != embedding.padding_idx)
        found = F.embedding(places.where(own, 0), weight)
        found = torch.where(trained[..., None], found, found.detach() * own[..., None])
        return how.leave(found * embedding.embed_scale.to(found.dtype) if scales else found)

    return forward
