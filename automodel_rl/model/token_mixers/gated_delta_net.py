"""Gated DeltaNet (Yang et al., arXiv:2412.06464), with a fresh state and convolution for every packed sequence.

Shape letters: t tokens of this rank, T tokens of the microbatch, h value heads of this rank, K and V dims of a key
and of a value.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.model.token_mixers.token_mixer import Rule, TokenMixer
from automodel_rl.model.token_mixers.whole_sequences import (
    convolve_heads,
    needs_fast_kernels,
    over_whole_sequences,
    own_channels,
)
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.tensor_parallel import Sections

CHUNK = 64
"""Tokens per chunk of `chunked_rule`."""

EPSILON = 1e-6
"""Added to the squared norm of queries and keys."""


class Decay(nn.Module):
    """Decay parameters, one value per value head. A module of their own, because they stay in fp32."""

    def __init__(self, A_log: nn.Parameter, dt_bias: nn.Parameter):
        super().__init__()
        self.A_log, self.dt_bias = A_log, dt_bias

    def forward(self, steps: Tensor) -> Tensor:
        """Returns log decays [t, h] for the layer's projection. Rounded to fp32 as in transformers, even in float64,
        so that comparisons with it are exact."""
        return -local_tensor(self.A_log).float().exp() * F.softplus(steps.float() + local_tensor(self.dt_bias))


@dataclass(frozen=True)
class GatedDeltaNet(TokenMixer):
    """Gated DeltaNet.

    Its rule maps queries and keys [T, key heads, K], values [T, h, V], log decays and write rates [T, h] and sequence
    lengths to [T, h, V].

    Attributes:
        norm: name of the output norm.
    """

    module: str = "linear_attn"
    norm: str = "norm"

    def set_apart(self, module: Any) -> None:
        module.decay = Decay(module.A_log, module.dt_bias)
        del module.A_log, module.dt_bias

    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        return _fla_rule if needs_fast_kernels("Gated DeltaNet", device, dtype) else chunked_rule

    def split(self, module: Any, tp: int) -> None:
        # Rates up to 2 let the state's eigenvalues be negative (arXiv:2411.12537).
        module.largest_rate = 2.0 if vars(module).get("allow_neg_eigval") else 1.0
        module.rows_of_conv = Sections((module.key_dim, module.key_dim, module.value_dim))
        for size in ("num_k_heads", "num_v_heads", "key_dim", "value_dim"):
            setattr(module, size, getattr(module, size) // tp)

    def forward(
        self, module: Any, hidden: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
    ) -> Tensor:
        q, k, v, gates, rates, steps = _projections(module, hidden)
        parts = (q, k, v, module.decay(steps)[..., None], (rates.sigmoid() * module.largest_rate)[..., None])
        mixed = _mix(module, parts, microbatch, cp_group)
        norm, output = module.get_submodule(self.norm), module.get_submodule(self.output)
        normed = norm(mixed.reshape(-1, module.head_v_dim), gates.reshape(-1, module.head_v_dim))
        return output(normed.view(1, len(mixed), -1))


def _projections(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Returns queries, keys, values and gates by heads, and rates and decay steps [t, h], from hidden states
    [1, t, H]."""
    own = dict(module.named_children())
    if "in_proj_qkvz" in own:  # Qwen3-Next: grouped by key head
        projected = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        q, k, v, gates, b, a = (tensor.squeeze(0) for tensor in projected)
    elif "in_proj_qkv" in own:
        sizes = [module.key_dim, module.key_dim, module.value_dim]
        q, k, v = module.in_proj_qkv(hidden).squeeze(0).split(sizes, dim=-1)
        gates, b, a = (project(hidden).squeeze(0) for project in (module.in_proj_z, module.in_proj_b, module.in_proj_a))
    else:  # OLMo Hybrid
        q, k, v, gates, b, a = (own[f"{name}_proj"](hidden).squeeze(0) for name in ("q", "k", "v", "g", "b", "a"))
    num_tokens = hidden.shape[1]
    return (
        q.reshape(num_tokens, -1, module.head_k_dim),
        k.reshape(num_tokens, -1, module.head_k_dim),
        v.reshape(num_tokens, -1, module.head_v_dim),
        gates.reshape(num_tokens, -1, module.head_v_dim),
        b,
        a,
    )


@torch.compiler.disable  # loops over sequences, or kernels that are compiled already
def _mix(
    module: Any, parts: tuple[Tensor, ...], microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Convolution and rule over whole sequences, [t, h, V]. `parts` are q, k, v, log decays and rates, each
    [t, heads, ...]."""
    weight = own_channels(module.conv1d.weight.squeeze(1), module.rows_of_conv, (module.tp_group, cp_group))

    def compute(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
        q, k, v = convolve_heads((q, k, v), weight, None, microbatch.offsets)
        return module.rule(q, k, v, decay[..., 0], rates[..., 0], microbatch.lengths).to(v.dtype)

    return over_whole_sequences(compute, parts, microbatch, cp_group)


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The rule in plain torch, in fp32 or wider, by sequence and chunk. Any device."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = v.shape[1] // q.shape[1]
    q, k = (normalised(part.to(wide)).repeat_interleave(groups, dim=1) for part in (q, k))
    parts = [
        part.to(wide).transpose(0, 1) for part in (q * q.shape[-1] ** -0.5, k, v, decay[..., None], rates[..., None])
    ]
    outputs = [_one_sequence(*pieces) for pieces in zip(*(part.split(lengths, dim=1) for part in parts), strict=True)]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def normalised(tensor: Tensor) -> Tensor:
    """Scales queries or keys [..., K] to unit length."""
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + EPSILON)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
    """The rule for one sequence (arXiv:2412.06464, section 3.3): two tensors [h, n, K], [h, n, V] and two [h, n, 1]
    -> [h, n, V]."""
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for cq, ck, cv, cd, cr in zip(*(part.split(CHUNK, dim=1) for part in (q, k, v, decay, rates)), strict=True):
        total = cd.cumsum(1)  # [h, c, 1]: log decay since the start of the chunk
        seen = torch.ones(cq.shape[1], cq.shape[1], dtype=torch.bool, device=q.device).tril()
        between = (total - total.transpose(1, 2)).masked_fill(~seen, -torch.inf).exp()
        system = (cr * ck) @ ck.transpose(1, 2) * between
        # A token's write to the state depends on the writes of earlier tokens in the chunk.
        wanted = cr * cv - cr * total.exp() * (ck @ state)
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append((cq * total.exp()) @ state + (cq @ ck.transpose(1, 2) * between) @ added)
        state = state * total[:, -1:].exp() + (ck * (total[:, -1:] - total).exp()).transpose(1, 2) @ added
    return torch.cat(outputs, dim=1)


def _fla_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # an optional dependency

    starts = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    q, k, v, decay, rates = (part.unsqueeze(0).contiguous() for part in (q, k, v, decay, rates))
    output, _ = chunk_gated_delta_rule(q, k, v, decay, rates, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    return output.squeeze(0)
