"""Mamba-2 (Dao and Gu, arXiv:2405.21060): each token scales its head's state down and adds to it.

Shape letters: t tokens of this rank, T tokens of the microbatch, h heads of this rank, P dims of a head, G groups of
heads that share keys and queries, N dims of these. The paper's B are keys, its C queries.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.errors import InputError
from automodel_rl.model.token_mixers.token_mixer import Rule, TokenMixer
from automodel_rl.model.token_mixers.whole_sequences import convolve_heads, fast_kernels_obstacle, over_whole_sequences
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.parallel.tensor_parallel import Sections, own_rows, sections_of_state_space

CHUNK = 64
"""Tokens per chunk of `chunked_rule`."""


class StateDecay(nn.Module):
    """State parameters, one value per head. A module of their own, because they stay in fp32.

    Args:
        limits: smallest and largest step.
    """

    def __init__(self, A_log: nn.Parameter, dt_bias: nn.Parameter, D: nn.Parameter, limits: tuple[float, float]):
        super().__init__()
        self.A_log, self.dt_bias, self.D, self.limits = A_log, dt_bias, D, limits

    def forward(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns steps and log decays, [t, h] in fp32 or wider, for the layer's projection [t, h], and the skip
        factors [h], copied because FSDP reshards the originals before their use."""
        wide = torch.promote_types(steps.dtype, torch.float32)
        steps = F.softplus(steps.to(wide) + local_tensor(self.dt_bias)).clamp(*self.limits)
        return steps, -local_tensor(self.A_log).float().exp() * steps, local_tensor(self.D).clone()


@dataclass(frozen=True)
class Mamba2(TokenMixer):
    """Mamba-2.

    Its rule maps queries and keys [T, h, N], values [T, h, P], log decays [T, h] and sequence lengths to [T, h, P].
    """

    def set_apart(self, module: Any) -> None:
        limits = (float(module.time_step_limit[0]), float(module.time_step_limit[1]))
        module.decay = StateDecay(module.A_log, module.dt_bias, module.D, limits)
        del module.A_log, module.dt_bias, module.D

    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        # No error without correct kernels: `chunked_rule` is fast enough, being matrix products.
        is_fast = dtype == torch.bfloat16 and fast_kernels_obstacle("Mamba-2", device) is None
        return _fla_rule if is_fast else chunked_rule

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
        gates, values, keys, queries, steps = self.projected(module, hidden).squeeze(0).split(sizes, dim=-1)
        steps, decay, skip = module.decay(steps)
        parts = (
            values.unflatten(1, (-1, module.head_dim)),
            steps[..., None],
            decay[..., None],
            keys.unflatten(1, (module.n_groups, -1)),
            queries.unflatten(1, (module.n_groups, -1)),
        )
        mixed = _mix(module, parts, skip, microbatch, cp_group).flatten(1)
        return module.out_proj(self.gated(module, mixed[None], gates[None]).to(hidden.dtype))

    def projected(self, module: Any, hidden: Tensor) -> Tensor:
        """Returns gates, values, keys, queries and steps of hidden states, [1, t, C]."""
        return module.in_proj(hidden)

    def gated(self, module: Any, mixed: Tensor, gates: Tensor) -> Tensor:
        """Returns the input of the last projection from the rule's outputs and the gates, all [1, t, h * P]."""
        return module.norm(mixed, gates)


@dataclass(frozen=True)
class ScaledMamba2(Mamba2):
    """Mamba-2 of Falcon-H1 (arXiv:2507.22448): factors on inputs and projections, in most models no norm. Its layers
    also have attention."""

    def split(self, module: Any, tp: int) -> None:
        if tp > 1 and module.mamba_rms_norm:
            raise InputError(
                f"parallel.tp={tp}: the norms in this model's Mamba-2 (mamba_rms_norm) cannot be split: use tp=1"
            )
        super().split(module, tp)

    def projected(self, module: Any, hidden: Tensor) -> Tensor:
        factors = module.mup_vector[0, 0]
        if module.tp_group is not None:
            factors = own_rows(factors, module.whole_sections, module.tp_group)
        return module.in_proj(hidden * module.ssm_in_multiplier) * factors

    def gated(self, module: Any, mixed: Tensor, gates: Tensor) -> Tensor:
        return module.norm(mixed, gates) if module.mamba_rms_norm else mixed * F.silu(gates)


@torch.compiler.disable  # loops over sequences, or kernels that are compiled already
def _mix(
    module: Any,
    parts: tuple[Tensor, ...],
    skip: Tensor,
    microbatch: LocalMicrobatch,
    cp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Convolution and rule over whole sequences, [t, h, P].

    Args:
        parts: values, steps, log decays, keys and queries of this rank's tokens, each [t, heads or groups, ...].
        skip: factors of the skip connection around the state, [h].
    """
    cuts_groups = _cuts_groups(module, cp_group)
    taps, bias = _own_taps(module, cp_group, cuts_groups)
    if cp_group is not None:
        skip = skip.chunk(cp_group.size())[cp_group.rank()]
    of_heads = _groups_of_heads(module, cp_group, cuts_groups)

    def compute(values: Tensor, steps: Tensor, decay: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
        values, keys, queries = convolve_heads((values, keys, queries), taps, bias, microbatch.offsets)
        keys, queries = (part.index_select(1, of_heads) for part in (keys, queries))
        wide = values.to(steps.dtype)
        mixed = module.rule(queries, keys, wide * steps, decay[..., 0], microbatch.lengths)
        return (mixed.to(wide.dtype) + skip[:, None] * wide).to(values.dtype)

    by_heads, of_all_heads = (parts, ()) if cuts_groups else (parts[:3], parts[3:])
    return over_whole_sequences(compute, by_heads, microbatch, cp_group, of_all_heads)


def _cuts_groups(module: Any, cp_group: dist.ProcessGroup | None) -> bool:
    """Returns whether each rank has all heads of its groups. Otherwise every rank has all groups."""
    is_split = not module.whole_sections.shared
    return is_split and (cp_group is None or module.n_groups % cp_group.size() == 0)


def _own_taps(module: Any, cp_group: dist.ProcessGroup | None, cuts_groups: bool) -> tuple[Tensor, Tensor | None]:
    """Returns taps and bias of this rank's channels: values of its heads, keys and queries of its groups."""
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
    """Returns the index of each head's group among this rank's groups, int64 [h]."""
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
    """The rule in plain torch, in fp32 or wider, all chunks at once (arXiv:2405.21060, section 6). Any device."""
    wide = torch.promote_types(v.dtype, torch.float32)
    rows, begins = _chunks(lengths, v.device)
    cq, ck, cv = (_in_chunks(part.to(wide), rows) for part in (q, k, v))  # [h, chunks, CHUNK, d]
    total = _in_chunks(decay.to(wide)[..., None], rows).cumsum(2)  # log decay since the start of the chunk
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    between = (total - total.transpose(2, 3)).masked_fill(~seen, -torch.inf).exp()
    within = (cq @ ck.transpose(2, 3) * between) @ cv
    last = total[:, :, -1:]
    added = (ck * (last - total).exp()).transpose(2, 3) @ cv  # [h, chunks, N, P]: contribution of each chunk
    states, state = [], torch.zeros_like(added[:, 0])
    for number, is_first in enumerate(begins):
        state = torch.zeros_like(state) if is_first else state
        states.append(state)
        state = state * last[:, number].exp() + added[:, number]
    before = torch.stack(states, dim=1)
    outputs = (within + (cq * total.exp()) @ before).flatten(1, 2).transpose(0, 1)  # [chunks * CHUNK, h, P]
    whole = outputs.new_zeros(len(v) + 1, *outputs.shape[1:])
    return whole.index_copy(0, rows, outputs)[:-1]


@functools.lru_cache(maxsize=4)  # shared by all layers
def _chunks(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[bool, ...]]:
    """Returns token indices of all chunks, int64 [chunks * CHUNK], and which chunks begin a sequence. Slots after a
    sequence's end hold the total number of tokens."""
    places: list[Tensor] = []
    begins: list[bool] = []
    start, total = 0, sum(lengths)
    for length in lengths:
        count = -(-length // CHUNK)
        own = torch.arange(count * CHUNK)
        places.append(torch.where(own < length, own + start, total))
        begins += [number == 0 for number in range(count)]
        start += length
    return torch.cat(places).to(device), tuple(begins)


def _in_chunks(tensor: Tensor, rows: Tensor) -> Tensor:
    """Reshapes [T, h, d] to [h, chunks, CHUNK, d]; empty slots are 0."""
    padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
    return padded.index_select(0, rows).transpose(0, 1).unflatten(1, (-1, CHUNK))


def _fla_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """flash-linear-attention's kernels: the rule is gated linear attention with a scalar decay."""
    from fla.ops.simple_gla import chunk_simple_gla  # an optional dependency

    starts = torch.tensor([0, *lengths], device=q.device).cumsum(0)
    q, k, v, decay = (part.unsqueeze(0).contiguous() for part in (q, k, v.to(q.dtype), decay))
    output, _ = chunk_simple_gla(q, k, v, g=decay, scale=1.0, cu_seqlens=starts)
    return output.squeeze(0)
