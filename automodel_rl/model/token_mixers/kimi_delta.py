"""Kimi Delta Attention (arXiv:2510.26692, section 3): Gated DeltaNet with a decay per key channel.

Shape letters: t tokens of this rank, T tokens of the microbatch, h heads of this rank, K dims of a key and of a
value.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.model.token_mixers.gated_delta_net import normalised
from automodel_rl.model.token_mixers.token_mixer import Rule, TokenMixer
from automodel_rl.model.token_mixers.whole_sequences import (
    convolve_heads,
    needs_fast_kernels,
    over_whole_sequences,
    own_channels,
)
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.tensor_parallel import Sections

CHUNK = 16
"""Tokens per chunk of `chunked_rule`, which holds a factor for each pair of them and each channel."""


class ChannelDecay(nn.Module):
    """Decay parameters. A module of their own, because they stay in fp32 and whole on every rank.

    Args:
        A_log: one value per head, [1, 1, heads, 1].
        dt_bias: one per channel, [heads * K].
    """

    def __init__(self, A_log: nn.Parameter, dt_bias: nn.Parameter):
        super().__init__()
        self.A_log, self.dt_bias = A_log, dt_bias

    def forward(self, steps: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Returns log decays for the layer's projection, both [t, h, K], rounded to fp32 where transformers does.
        `group` are the ranks that split heads."""
        heads, rank = steps.shape[1], 0 if group is None else group.rank()
        own = slice(rank * heads, (rank + 1) * heads)
        rate = local_tensor(self.A_log).float().exp().view(-1, 1)[own]
        bias = local_tensor(self.dt_bias).float().view(-1, steps.shape[2])[own]
        return -rate * F.softplus(steps.float() + bias)


@dataclass(frozen=True)
class KimiDelta(TokenMixer):
    """Kimi Delta Attention.

    Its rule maps queries, keys, values and log decays, each [T, h, K], write rates [T, h] and sequence lengths to
    [T, h, K].
    """

    module: str = "self_attn"
    output: str = "o_proj"

    def set_apart(self, module: Any) -> None:
        gate = module.forget_gate
        module.decay = ChannelDecay(gate.A_log, gate.dt_bias)
        del gate.A_log, gate.dt_bias

    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        return _fla_rule if needs_fast_kernels("Kimi Delta Attention", device, dtype) else chunked_rule

    def split(self, module: Any, tp: int) -> None:
        module.rows_of_conv = Sections((module.qkv_dim,) * 3)
        module.qkv_dim //= tp

    def forward(
        self, module: Any, hidden: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
    ) -> Tensor:
        def of_heads(projected: Tensor) -> Tensor:
            return projected.view(hidden.shape[1], -1, module.head_dim)

        q, k, v = (of_heads(project(hidden)) for project in (module.q_proj, module.k_proj, module.v_proj))
        steps = of_heads(module.forget_gate.f_b_proj(module.forget_gate.f_a_proj(hidden)))
        rates = module.b_proj(hidden).sigmoid().view(hidden.shape[1], -1, 1)
        mixed = _mix(module, (q, k, v, module.decay(steps, module.tp_group), rates), microbatch, cp_group)
        normed = module.o_norm(mixed, of_heads(module.g_b_proj(module.g_a_proj(hidden))))
        return module.o_proj(normed.reshape(1, len(mixed), -1))


@torch.compiler.disable  # loops over sequences, or kernels that are compiled already
def _mix(
    module: Any, parts: tuple[Tensor, ...], microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Convolution and rule over whole sequences, [t, h, K]. `parts` are q, k, v, log decays and rates, each
    [t, heads, ...]."""
    weight = own_channels(module.conv1d.weight.squeeze(1), module.rows_of_conv, (module.tp_group, cp_group))

    def compute(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
        q, k, v = convolve_heads((q, k, v), weight, None, microbatch.offsets)
        return module.rule(q, k, v, decay, rates[..., 0], microbatch.lengths).to(v.dtype)

    return over_whole_sequences(compute, parts, microbatch, cp_group)


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The rule in plain torch, in fp32 or wider, by sequence and chunk. Any device."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = (normalised(part.to(wide)) for part in (q, k))
    parts = [part.to(wide).transpose(0, 1) for part in (q * q.shape[-1] ** -0.5, k, v, decay, rates[..., None])]
    outputs = [_one_sequence(*pieces) for pieces in zip(*(part.split(lengths, dim=1) for part in parts), strict=True)]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
    """The rule for one sequence (arXiv:2510.26692, eq. 1): four tensors [h, n, K] and one [h, n, 1] -> [h, n, K]."""
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for cq, ck, cv, cd, cr in zip(*(part.split(CHUNK, dim=1) for part in (q, k, v, decay, rates)), strict=True):
        total = cd.cumsum(1)  # [h, c, K]: log decay since the start of the chunk
        seen = torch.ones(cq.shape[1], cq.shape[1], dtype=torch.bool, device=q.device).tril()[..., None]
        between = (total[:, :, None] - total[:, None]).masked_fill(~seen, -torch.inf).exp()  # [h, c, c, K]
        system = ((cr * ck)[:, :, None] * ck[:, None] * between).sum(-1)
        # A token's write to the state depends on the writes of earlier tokens in the chunk.
        wanted = cr * cv - (cr * ck * total.exp()) @ state
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append((cq * total.exp()) @ state + (cq[:, :, None] * ck[:, None] * between).sum(-1) @ added)
        left = (ck * (total[:, -1:] - total).exp()).transpose(1, 2)
        state = state * total[:, -1, :, None].exp() + left @ added
    return torch.cat(outputs, dim=1)


def _fla_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor, lengths: tuple[int, ...]) -> Tensor:
    from fla.ops.kda import chunk_kda  # an optional dependency

    starts = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    q, k, v, decay, rates = (part.unsqueeze(0).contiguous() for part in (q, k, v, decay, rates))
    output, _ = chunk_kda(q, k, v, decay, rates, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    return output.squeeze(0)
