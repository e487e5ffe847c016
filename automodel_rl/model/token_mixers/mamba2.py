"""Mamba-2 (Dao and Gu, arXiv:2405.21060): a state for each head that every token scales down and adds to.

Shape letters: t tokens of this rank, T tokens of the microbatch, h heads of this rank, P dims of a head, G groups of
heads that share keys and queries, N dims of these. The paper's B are keys, its C queries.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.model.token_mixers.token_mixer import Rule, TokenMixer
from automodel_rl.model.token_mixers.whole_sequences import convolve, has_fast_kernels, over_whole_sequences
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.tensor_parallel import Sections, own_rows, sections_of_state_space

CHUNK = 64
"""Tokens that the reference computes at once."""


class StateDecay(nn.Module):
    """The parameters of a layer's state. They are a module of their own because they stay in fp32.

    Args:
        A_log, dt_bias, D: the layer's parameters of these names, one number for each head.
        limits: the least and the largest step.
    """

    def __init__(self, A_log: nn.Parameter, dt_bias: nn.Parameter, D: nn.Parameter, limits: tuple[float, float]):
        super().__init__()
        self.A_log, self.dt_bias, self.D, self.limits = A_log, dt_bias, D, limits

    def forward(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Steps and logs of the decays, both [t, h] in fp32 or wider, from the layer's projection [t, h]."""
        wide = torch.promote_types(steps.dtype, torch.float32)
        steps = F.softplus(steps.to(wide) + local_tensor(self.dt_bias)).clamp(*self.limits)
        return steps, -local_tensor(self.A_log).float().exp() * steps


@dataclass(frozen=True)
class Mamba2(TokenMixer):
    """Mamba-2.

    Its rule takes queries [T, h, N], keys [T, h, N], values [T, h, P], logs of decays [T, h] and lengths of sequences,
    and gives [T, h, P].
    """

    def set_apart(self, module: Any) -> None:
        limits = (float(module.time_step_limit[0]), float(module.time_step_limit[1]))
        module.decay = StateDecay(module.A_log, module.dt_bias, module.D, limits)
        del module.A_log, module.dt_bias, module.D

    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        return _fla_rule if has_fast_kernels("Mamba-2", device, dtype) else chunked_rule

    def split(self, module: Any, tp: int) -> None:
        module.whole_sections = sections_of_state_space(module, tp)
        module.num_all_heads, module.heads_of_group = module.num_heads, module.num_heads // module.n_groups
        module.num_heads, module.intermediate_size = module.num_heads // tp, module.intermediate_size // tp
        if module.n_groups % tp == 0:
            module.n_groups //= tp

    def forward(
        self, module: Any, hidden: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
    ) -> Tensor:
        states = module.n_groups * module.ssm_state_size
        sizes = [module.intermediate_size, module.intermediate_size, states, states, module.num_heads]
        gates, values, keys, queries, steps = module.in_proj(hidden).squeeze(0).split(sizes, dim=-1)
        steps, decay = module.decay(steps)
        parts = (
            values.unflatten(1, (-1, module.head_dim)),
            keys.unflatten(1, (module.n_groups, -1)),
            queries.unflatten(1, (module.n_groups, -1)),
            steps[..., None],
            decay[..., None],
        )
        mixed = _mix(module, parts, microbatch, cp_group).flatten(1)
        return module.out_proj(module.norm(mixed[None], gates[None]).to(hidden.dtype))


@torch.compiler.disable  # loops over sequences, or kernels that are compiled already
def _mix(
    module: Any, parts: tuple[Tensor, ...], microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Convolution and rule over whole sequences, [t, h, P].

    Args:
        module: transformers' module.
        parts: values, keys, queries, steps and logs of decays of this rank's tokens, each [t, heads or groups, ...].
        microbatch: this rank's tokens.
        cp_group: the ranks that share a microbatch.
    """
    values, keys, queries, steps, decay = parts
    cuts_groups = _cuts_groups(module, cp_group)
    taps, bias = _own_taps(module, cp_group, cuts_groups)
    skip = local_tensor(module.decay.D)
    if cp_group is not None:
        skip = skip.chunk(cp_group.size())[cp_group.rank()]
    of_heads = _groups_of_heads(module, cp_group, cuts_groups)

    def compute(values: Tensor, steps: Tensor, decay: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        shapes = [part.shape[1:] for part in (values, keys, queries)]
        joined = torch.cat([part.flatten(1) for part in (values, keys, queries)], dim=-1)
        joined = F.silu(convolve(joined, taps, bias, microbatch.offsets))
        pieces = joined.split([shape.numel() for shape in shapes], dim=-1)
        values, keys, queries = (piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True))
        keys, queries = (part.index_select(1, of_heads) for part in (keys, queries))
        wide = values.to(steps.dtype)
        mixed = module.rule(queries, keys, wide * steps, decay[..., 0], microbatch.lengths)
        return (mixed.to(wide.dtype) + skip[:, None] * wide).to(values.dtype)

    if cuts_groups:

        def of_groups(values: Tensor, keys: Tensor, queries: Tensor, steps: Tensor, decay: Tensor) -> Tensor:
            return compute(values, steps, decay, keys, queries)

        return over_whole_sequences(of_groups, parts, microbatch, cp_group)
    return over_whole_sequences(compute, (values, steps, decay), microbatch, cp_group, (keys, queries))


def _cuts_groups(module: Any, cp_group: dist.ProcessGroup | None) -> bool:
    """Whether each rank has all heads of its groups. Else every rank has all groups."""
    is_split = not module.whole_sections.shared
    return is_split and (cp_group is None or module.n_groups % cp_group.size() == 0)


def _own_taps(module: Any, cp_group: dist.ProcessGroup | None, cuts_groups: bool) -> tuple[Tensor, Tensor | None]:
    """Taps and bias of the channels that this rank convolves: values of its heads, keys and queries of its groups."""
    sections = module.whole_sections.within(1, 4)
    taps, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    if module.tp_group is not None:
        taps, bias = (None if part is None else own_rows(part, sections, module.tp_group) for part in (taps, bias))
        sections = sections.of_rank(module.tp_group.size())
    if cp_group is not None:
        sections = Sections(sections.rows, () if cuts_groups else (1, 2))
        taps, bias = (None if part is None else own_rows(part, sections, cp_group) for part in (taps, bias))
    return taps, bias


def _groups_of_heads(module: Any, cp_group: dist.ProcessGroup | None, cuts_groups: bool) -> Tensor:
    """The place of each of this rank's heads' group among the groups that it has, int64 [h]."""
    first, count = 0, module.num_all_heads
    for group in (module.tp_group, cp_group):
        if group is not None:
            count //= group.size()
            first += group.rank() * count
    groups = torch.arange(first, first + count, device=module.conv1d.weight.device) // module.heads_of_group
    if not module.whole_sections.shared and module.tp_group is not None:
        groups = groups - module.tp_group.rank() * module.n_groups
    if cp_group is not None and cuts_groups:
        groups = groups - cp_group.rank() * (module.n_groups // cp_group.size())
    return groups


def chunked_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The rule written out in fp32 or wider, sequence by sequence and chunk by chunk. Any device."""
    wide = torch.promote_types(v.dtype, torch.float32)
    parts = [part.to(wide).transpose(0, 1) for part in (q, k, v, decay[..., None])]
    outputs = [_one_sequence(*pieces) for pieces in zip(*(part.split(lengths, dim=1) for part in parts), strict=True)]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """The rule for one sequence (arXiv:2405.21060, section 6): [h, n, N], [h, n, N], [h, n, P], [h, n, 1] to
    [h, n, P]."""
    state, outputs = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for cq, ck, cv, cd in zip(*(part.split(CHUNK, dim=1) for part in (q, k, v, decay)), strict=True):
        total = cd.cumsum(1)  # [h, c, 1]: the log of the decay since the chunk's beginning
        seen = torch.ones(cq.shape[1], cq.shape[1], dtype=torch.bool, device=q.device).tril()
        between = (total - total.transpose(1, 2)).masked_fill(~seen, -torch.inf).exp()
        outputs.append((cq * total.exp()) @ state + (cq @ ck.transpose(1, 2) * between) @ cv)
        state = state * total[:, -1:].exp() + (ck * (total[:, -1:] - total).exp()).transpose(1, 2) @ cv
    return torch.cat(outputs, dim=1)


def _fla_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The kernels of flash-linear-attention. They have the same rule as gated linear attention with a scalar decay."""
    from fla.ops.simple_gla import chunk_simple_gla  # an optional dependency

    starts = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    q, k, v, decay = (part.unsqueeze(0).contiguous() for part in (q, k, v.to(q.dtype), decay))
    output, _ = chunk_simple_gla(q, k, v, g=decay, scale=1.0, cu_seqlens=starts)
    return output.squeeze(0)
