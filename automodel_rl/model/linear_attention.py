"""Gated DeltaNet (Yang et al., arXiv:2412.06464) over microbatches: layers whose cost grows with the number of tokens.

Every sequence has a state of its own, which starts at 0, and a short convolution that does not look into the sequence
before. transformers' layers leak from one packed sequence into the next, so their forward is replaced here.

Context parallelism shares heads instead of tokens in these layers: ranks exchange their tokens of all heads for all
tokens of some heads, compute, and exchange the results back. Tensor parallelism splits heads as well.

Shape letters: t tokens of this rank, T tokens of the microbatch, h value heads of this rank, K and V dims of a key and
of a value.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.errors import InputError
from automodel_rl.parallel.collectives import AllToAll
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.tensor_parallel import TensorParallel, own_rows

CHUNK = 64
"""Tokens that the reference computes at once."""

EPSILON = 1e-6
"""What is added to the squared norm of queries and keys."""

WRONG_TRITON = (Version("3.4.0"), Version("3.7.1"))
"""Versions of Triton that compile fla's kernels to wrong gradients: from the first up to the second, which is right
(flash-linear-attention, issue 640)."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]
"""(queries [T, h, K], keys [T, h, K], values [T, h, V], logs of decays [T, h], rates [T, h], lengths) -> [T, h, V]"""


class Decay(nn.Module):
    """The parameters of a layer's decay. They are a module of their own because they stay in fp32.

    Args:
        A_log, dt_bias: the layer's parameters of these names, one number for each value head.
    """

    def __init__(self, A_log: nn.Parameter, dt_bias: nn.Parameter):
        super().__init__()
        self.A_log, self.dt_bias = A_log, dt_bias

    def forward(self, steps: Tensor) -> Tensor:
        """Logs of the decays, [t, h], from the layer's projection. Rounded to fp32 where transformers does so, also in
        float64, for else no comparison with it would be exact."""
        return -local_tensor(self.A_log).float().exp() * F.softplus(steps.float() + local_tensor(self.dt_bias))


def set_decays_apart(model: nn.Module) -> None:
    """Moves the parameters of decays into a module `decay` of each linear-attention layer."""
    for layer in linear_attention_of(model):
        layer.decay = Decay(layer.A_log, layer.dt_bias)
        del layer.A_log, layer.dt_bias


def linear_attention_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == "linear_attn"]


def choose_rule(device: torch.device, dtype: torch.dtype) -> Rule:
    """The function that computes the rule: fla's kernels in 16 bits on CUDA, else the reference.

    Raises:
        InputError: fla's kernels are needed and not there, or would be wrong.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return chunked_rule
    if importlib.util.find_spec("fla") is None:
        raise InputError(
            "model.path: Gated DeltaNet needs the package fla-core on CUDA, which is not installed: "
            "pip install 'automodel-rl[fla]', or set model.dtype=float32"
        )
    triton = Version(importlib.metadata.version("triton"))
    if WRONG_TRITON[0] <= triton < WRONG_TRITON[1]:
        raise InputError(
            f"model.path: Gated DeltaNet would get wrong gradients from Triton {triton}: install torch 2.13 (Triton "
            "3.7.1), or set model.dtype=float32"
        )
    return _fla_rule


def install_linear_attention(part: nn.Module, how: TensorParallel, rule: Rule) -> None:
    """Gives the linear-attention layers of a part a forward over microbatches.

    Args:
        part: the part, after tensor parallelism has split it.
        how: this rank's place among the ranks that split layers.
        rule: computes the rule.
    """
    tp = 1 if how.group is None else how.group.size()
    for layer in linear_attention_of(part):
        layer.rows_of_conv = (layer.key_dim, layer.key_dim, layer.value_dim)
        for size in ("num_k_heads", "num_v_heads", "key_dim", "value_dim"):
            setattr(layer, size, getattr(layer, size) // tp)
        layer.tp_group, layer.rule = how.group, rule
        layer.forward = MethodType(_forward, layer)


def _forward(
    layer: Any, hidden_states: Tensor, *, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None, **_: Any
) -> Tensor:
    """The layer's forward for [1, t, H]."""
    q, k, v, z, rates, steps = _projections(layer, hidden_states)
    parts = (q, k, v, layer.decay(steps)[..., None], rates.sigmoid()[..., None])
    mixed = _mix(layer, parts, microbatch, cp_group)
    normed = layer.norm(mixed.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(1, len(mixed), -1))


def _projections(layer: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys, values and gates by heads, and the two numbers of each value head, for [1, t, H]."""
    if "in_proj_qkvz" in dict(layer.named_children()):  # Qwen3-Next: the columns of a key head are together
        projected = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
        q, k, v, z, b, a = (tensor.squeeze(0) for tensor in projected)
    else:
        q, k, v = layer.in_proj_qkv(hidden).squeeze(0).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
        z, b, a = (project(hidden).squeeze(0) for project in (layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    num_tokens = hidden.shape[1]
    return (
        q.reshape(num_tokens, -1, layer.head_k_dim),
        k.reshape(num_tokens, -1, layer.head_k_dim),
        v.reshape(num_tokens, -1, layer.head_v_dim),
        z.reshape(num_tokens, -1, layer.head_v_dim),
        b,
        a,
    )


@torch.compiler.disable  # loops over sequences, or kernels that are compiled already
def _mix(
    layer: Any, parts: tuple[Tensor, ...], microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Convolution and rule over whole sequences, [t, h, V].

    Args:
        layer: the layer.
        parts: queries, keys and values, logs of decays and rates of this rank's tokens, each [t, heads, ...].
        microbatch: this rank's tokens.
        cp_group: the ranks that share a microbatch.
    """
    weight = layer.conv1d.weight.squeeze(1)
    if layer.tp_group is not None:
        weight = own_rows(weight, layer.rows_of_conv, layer.tp_group)
    if cp_group is not None:
        weight = own_rows(weight, (layer.key_dim, layer.key_dim, layer.value_dim), cp_group)
        parts = to_heads(parts, cp_group)
    if microbatch.restore is not None:  # pads are left out, and so is the order of ranks
        parts = tuple(part.index_select(0, microbatch.restore) for part in parts)
    q, k, v, decay, rates = parts
    heads = [part.shape[1] for part in (q, k, v)]
    joined = _convolve(torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1), weight, microbatch.offsets)
    q, k, v = (
        piece.unflatten(1, (count, -1))
        for piece, count in zip(joined.split([part[0].numel() for part in (q, k, v)], dim=-1), heads, strict=True)
    )
    mixed = layer.rule(q, k, v, decay[..., 0], rates[..., 0], microbatch.lengths).to(v.dtype)
    if microbatch.restore is not None:
        whole = mixed.new_zeros(microbatch.num_tokens * (1 if cp_group is None else cp_group.size()), *mixed.shape[1:])
        mixed = whole.index_copy(0, microbatch.restore, mixed)
    return mixed if cp_group is None else from_heads(mixed, cp_group)


def to_heads(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchanges [t, heads, d] of this rank's tokens for [size * t, heads / size, d] of all ranks' tokens, rank 0's
    first. The dtype of the tensors together is the widest."""
    size, num_tokens = group.size(), len(parts[0])
    widest = torch.promote_types(parts[0].dtype, parts[3].dtype)
    cut = [part.to(widest).unflatten(1, (size, -1)).transpose(0, 1).flatten(2) for part in parts]  # [size, t, ...]
    sent = [num_tokens] * size
    came = AllToAll.apply(torch.cat(cut, dim=-1).flatten(0, 1), sent, sent, 0, group)
    pieces = came.split([piece.shape[-1] for piece in cut], dim=-1)
    return tuple(
        piece.unflatten(1, (part.shape[1] // size, -1)).to(part.dtype)
        for piece, part in zip(pieces, parts, strict=True)
    )


def from_heads(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges [size * t, heads / size, d] for [t, heads, d]."""
    size = group.size()
    sent = [len(whole) // size] * size
    came = AllToAll.apply(whole.flatten(1), sent, sent, 0, group).unflatten(0, (size, -1)).transpose(0, 1)
    return came.unflatten(2, whole.shape[1:]).flatten(1, 2)


def _convolve(inputs: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """SiLU of the causal convolution of every sequence, [T, C].

    Args:
        inputs: [T, C].
        weight: the taps of every channel, [C, W]; the last one is that of the token itself.
        offsets: the place of each token in its sequence, int64 [T].
    """
    total = inputs * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(inputs, (0, 0, back, 0))[: len(inputs)] * (offsets >= back)[:, None]
        total = total + earlier * weight[:, -1 - back]
    return F.silu(total)


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The rule written out in fp32 or wider, sequence by sequence and chunk by chunk. Any device."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = v.shape[1] // q.shape[1]
    q, k = (_normalised(part.to(wide)).repeat_interleave(groups, dim=1) for part in (q, k))
    parts = [
        part.to(wide).transpose(0, 1) for part in (q * q.shape[-1] ** -0.5, k, v, decay[..., None], rates[..., None])
    ]
    outputs = [_one_sequence(*pieces) for pieces in zip(*(part.split(lengths, dim=1) for part in parts), strict=True)]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _normalised(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + EPSILON)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
    """The rule for one sequence (arXiv:2412.06464, section 3.3): [h, n, K], [h, n, K], [h, n, V], [h, n, 1] twice to
    [h, n, V]."""
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for cq, ck, cv, cd, cr in zip(*(part.split(CHUNK, dim=1) for part in (q, k, v, decay, rates)), strict=True):
        total = cd.cumsum(1)  # [h, c, 1]: the log of the decay since the chunk's beginning
        seen = torch.ones(cq.shape[1], cq.shape[1], dtype=torch.bool, device=q.device).tril()
        between = (total - total.transpose(1, 2)).masked_fill(~seen, -torch.inf).exp()
        system = (cr * ck) @ ck.transpose(1, 2) * between
        # What a token adds to the state depends on what the tokens before it in the chunk have added.
        wanted = cr * cv - cr * total.exp() * (ck @ state)
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append((cq * total.exp()) @ state + (cq @ ck.transpose(1, 2) * between) @ added)
        state = state * total[:, -1:].exp() + (ck * (total[:, -1:] - total).exp()).transpose(1, 2) @ added
    return torch.cat(outputs, dim=1)


def _fla_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The kernels of flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # an optional dependency

    starts = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    q, k, v, decay, rates = (part.unsqueeze(0).contiguous() for part in (q, k, v, decay, rates))
    output, _ = chunk_gated_delta_rule(q, k, v, decay, rates, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    return output.squeeze(0)
