"""Attention over microbatches: causal within each sequence, and nothing across sequences. In some models, tokens of
an image also see each other in both directions.

Backends are registered with transformers' AttentionInterface, which layers of transformers' and nemo_automodel's
models use alike. The microbatch is passed as the keyword `microbatch` of every layer.

Shape letters: q queries and k keys of one call (`AttentionCall`), t tokens of this rank, D head dim.
"""

import copy
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from automodel_rl.batch import AttentionCall, LocalMicrobatch
from automodel_rl.compat.flash_kernels import Segments
from automodel_rl.compat.modules import set_attention
from automodel_rl.compat.versions import TORCH
from automodel_rl.config.model import Attention
from automodel_rl.errors import InputError
from automodel_rl.model import flash_attention_3, flash_sinks
from automodel_rl.model.indexer_loss import AddGradients
from automodel_rl.model.sparse_attention import QUERIES_AT_ONCE, KeyIndex, SequenceAttention
from automodel_rl.parallel.collectives import AllGatherCP, from_heads, to_heads
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.support.attention import ATTENTION, FASTEST_FIRST
from automodel_rl.support.combination import Combination

# From torch 2.12 on, varlen_attn accepts fewer KV heads than query heads only with this flag.
_GQA: dict[str, Any] = {"enable_gqa": True} if TORCH >= (2, 12) else {}


@dataclass(frozen=True)
class AttentionParameters:
    """Parameters of attention besides those of an `AttentionCall`.

    Attributes:
        window: number of keys that a query sees, its own included; None for all.
        softcap: if set, scores become softcap * tanh(scores / softcap).
        sinks: a score per query head that takes part in the softmax but has no value.
        index: selects the keys that each query of the call sees; None for all.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    index: KeyIndex | None = None


Backend = Callable[[Tensor, Tensor, Tensor, AttentionCall, AttentionParameters], Tensor]
"""(query [q, heads, D], key [k, KV heads, D], value [k, KV heads, Dv], call, parameters) -> [q, heads, Dv]"""


def register_attention() -> None:
    """Registers every backend with transformers as `automodel_rl_NAME`."""
    for name, backend in BACKENDS.items():
        function: Any = functools.partial(packed_attention, backend)
        if not ATTENTION[name].is_traceable:
            function = torch.compiler.disable(function)
        AttentionInterface.register(_registered(name), function)


def set_attention_of_heads(model: Any, head_dim: int, name: str) -> None:
    """Sets the attention of layers with this head dim to a name from `choose_attention`."""
    for layer in model.model.layers:
        attention = dict(layer.named_children()).get("self_attn")
        if attention is not None and attention.head_dim == head_dim:
            attention.config = copy.copy(attention.config)
            set_attention(attention.config, name)


def choose_attention(combination: Combination, device: torch.device, dtype: torch.dtype, compiled: bool) -> str:
    """Returns the registered name for the config's `attention`. `auto` takes the fastest backend that runs here and,
    for compiled layers, can be traced.

    Raises:
        InputError: the backend cannot run here.
    """
    requested, description = combination.model.attention, combination.description
    if requested == "auto":
        candidates = [name for name in FASTEST_FIRST if ATTENTION[name].is_traceable or not compiled]
        slow = "eager" if description.lacks_sdpa else "sdpa"
        return _registered(next((name for name in candidates if not _obstacle(name, combination, device, dtype)), slow))
    obstacle = _obstacle(requested, combination, device, dtype)
    if obstacle:
        raise InputError(f"model.attention={requested} {obstacle}: use model.attention=auto")
    return _registered(requested)


def _obstacle(name: Attention, combination: Combination, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why a backend cannot run here; None if it can."""
    limits, description = ATTENTION[name], combination.description
    if limits.needs_cuda and device.type != "cuda":
        return "needs CUDA, but this rank has none"
    if limits.needs_cuda and dtype != torch.bfloat16:
        return f"computes in bfloat16, not {dtype}"
    if description.has_softcap and not limits.has_softcap:
        return "does not support a soft cap"
    if combination.family.has_sinks and not limits.has_sinks:
        return "does not support sinks"
    if combination.parallel.gathers_keys and description.has_windows and not limits.has_windows_over_cp:
        return "does not support sliding windows with context parallelism"
    if description.is_bidirectional_in_images and not limits.has_bidirectional_images:
        return "computes causal attention only, but tokens of an image attend to each other both ways"
    if name == "te" and importlib.util.find_spec("transformer_engine") is None:
        return "needs TransformerEngine, which is not installed (pip install 'automodel-rl[te]')"
    dims = (description.head_dim, description.value_dim)
    if name == "fa3" and (obstacle := flash_attention_3.obstacle(*dims, device)):
        return obstacle
    return _failure(name, dims, combination.family.has_sinks, device) if limits.needs_cuda else None


def _failure(name: Attention, dims: tuple[int, int], has_sinks: bool, device: torch.device) -> str | None:
    """Returns how a backend fails on a few tokens; None if it works. Only a trial reveals wheels for another torch or
    GPU, and missing kernels."""
    call = AttentionCall(None, None, *(torch.tensor([0, 8], dtype=torch.int32, device=device),) * 2, (8,), (8,))
    query, value = (torch.zeros(8, 1, dim, dtype=torch.bfloat16, device=device) for dim in dims)
    try:
        key = query.clone().requires_grad_()
        parameters = AttentionParameters(1.0, sinks=query.new_zeros(1) if has_sinks else None)
        BACKENDS[name](query.requires_grad_(), key, value, call, parameters).sum().backward()
    except Exception as error:  # any library's, import errors included
        return f"fails here for heads of {dims[0]} dims ({type(error).__name__}: {str(error)[:80]})"
    return None


def packed_attention(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    microbatch: LocalMicrobatch,
    cp_group: dist.ProcessGroup | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: KeyIndex | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens, in transformers' signature.

    Args:
        query: [1, query heads, t, D].
        key, value: [1, KV heads, t, D]; under context parallelism those of all ranks are gathered, or heads
            exchanged.
        indices: the indexer's result for this rank's tokens, if the layer has one.

    Returns:
        [1, t, query heads, D], and None for the attention weights.
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    sinks = None if s_aux is None else local_tensor(s_aux)
    index = indices if indices is None or cp_group is None else indices.gathered(cp_group)
    parameters = AttentionParameters(scaling, sliding_window, softcap, sinks, index)
    images = microbatch.image_call
    if images is not None and images.only_windows and sliding_window is None:
        images = None
    if cp_group is None:
        (call,) = microbatch.calls
        output = _attended(backend, q, k, v, call, parameters).contiguous()  # some layers view it
        if images is None:
            return output.unsqueeze(0), None
        gathered = torch.cat([k, v], dim=-1)
    elif microbatch.calls[0].queries is None:
        return _of_own_heads(backend, (q, k, v), microbatch.calls[0], parameters, cp_group).unsqueeze(0), None
    else:
        # Each rank's queries use the keys differently, so their gradients add up.
        gathered = AllGatherCP.apply(torch.cat([k, v], dim=-1), cp_group, "sum")
        parts = [_outputs_of(backend, q, gathered, call, parameters) for call in microbatch.calls]
        places, outputs = (torch.cat(found) for found in zip(*parts, strict=True))
        output = torch.zeros_like(outputs).index_copy(0, places, outputs)
    if images is not None:
        places, outputs = _outputs_of(backend, q, gathered, images, parameters)
        output = output.index_copy(0, places, outputs)
    return output.unsqueeze(0), None


def _of_own_heads(
    backend: Backend,
    tensors: tuple[Tensor, Tensor, Tensor],
    call: AttentionCall,
    parameters: AttentionParameters,
    cp_group: dist.ProcessGroup,
) -> Tensor:
    """Exchanges tokens for heads, computes all ranks' tokens in this rank's heads, and exchanges back:
    [t, heads, Dv].

    Args:
        call: the call for all tokens, in the order of its keys.
    """
    if parameters.sinks is not None:
        parameters = replace(parameters, sinks=parameters.sinks.chunk(cp_group.size())[cp_group.rank()])
    assert call.keys is not None
    q, k, v = (tensor.index_select(0, call.keys) for tensor in to_heads(tensors, cp_group))
    output = _attended(backend, q, k, v, call, parameters)
    return from_heads(torch.zeros_like(output).index_copy(0, call.keys, output), cp_group)


def _outputs_of(
    backend: Backend, q: Tensor, gathered: Tensor, call: AttentionCall, parameters: AttentionParameters
) -> tuple[Tensor, Tensor]:
    """Computes one call for some of this rank's queries.

    Args:
        q: all queries of this rank, [t, heads, D].
        gathered: keys and values of all ranks side by side, [t * cp, KV heads, D + Dv].

    Returns:
        Indices among this rank's tokens, int64 [m], and their outputs, [m, heads, Dv].
    """
    places = call.queries
    assert places is not None
    assert call.keys is not None
    head_dim = q.shape[-1]
    keys, values = gathered.index_select(0, call.keys).split([head_dim, gathered.shape[-1] - head_dim], dim=-1)
    if parameters.index is not None:
        parameters = replace(parameters, index=parameters.index.of(places, call.keys))
    output = _attended(backend, q.index_select(0, places), keys, values, call, parameters)
    if call.counted is None:
        return places, output
    return places.index_select(0, call.counted), output.index_select(0, call.counted)


def _attended(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters
) -> Tensor:
    """Runs the backend or, where an indexer selects fewer keys than there are, attention over the selected keys."""
    index = parameters.index
    chooses = index is not None and call.longest_key > index.most
    output = (_over_chosen_keys if chooses else backend)(q, k, v, call, parameters)
    return output if index is None or index.loss is None else _with_indexer_loss(output, q, k, call, parameters)


@torch.compiler.disable
def _with_indexer_loss(
    output: Tensor, q: Tensor, k: Tensor, call: AttentionCall, parameters: AttentionParameters
) -> Tensor:
    """Attaches the gradient of the indexer's own loss to attention's output."""
    index = parameters.index
    assert index is not None
    assert index.loss is not None

    def attention(queries: slice, keys: slice) -> SequenceAttention:
        key = k.detach()[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        causal = _mask(queries.stop - queries.start, len(key), True, parameters.window, q.device)
        return SequenceAttention(queries, keys, q.detach()[queries], key, parameters.scale, causal)

    is_real = index.loss.is_real(call.queries)
    gradients = index.gradients((attention(*segment) for segment in _segments(call)), is_real)
    return AddGradients.apply(output, index.queries, index.keys, index.weights, *gradients)


@torch.compiler.disable
def _over_chosen_keys(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """Attention over an indexer's selected keys, by masks, for some queries at a time. Costs as much as attention
    over all keys."""
    index, outputs = parameters.index, []
    assert index is not None
    for queries, keys in _segments(call):
        sk, sv = (t[keys].transpose(0, 1)[None] for t in (k, v))
        causal = _mask(queries.stop - queries.start, sk.shape[2], True, parameters.window, q.device)
        for start in range(queries.start, queries.stop, QUERIES_AT_ONCE):
            some = slice(start, min(start + QUERIES_AT_ONCE, queries.stop))
            own = causal[some.start - queries.start : some.stop - queries.start]
            seen = index.seen(some, keys, own)
            sq = q[some].transpose(0, 1)[None]
            outputs.append(F.scaled_dot_product_attention(sq, sk, sv, seen, scale=parameters.scale, enable_gqa=True))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """torch's scaled_dot_product_attention, one call per sequence. Any device and dtype."""
    outputs = []
    for queries, keys in _segments(call):
        sq, sk, sv = (t[part].transpose(0, 1)[None] for t, part in ((q, queries), (k, keys), (v, keys)))
        plain = sq.shape[2] == sk.shape[2] and (parameters.window is None or parameters.window >= sk.shape[2])
        plain = plain and call.is_causal
        mask = None if plain else _mask(sq.shape[2], sk.shape[2], call.is_causal, parameters.window, q.device)
        outputs.append(
            F.scaled_dot_product_attention(sq, sk, sv, mask, is_causal=plain, scale=parameters.scale, enable_gqa=True)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def eager(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """Attention in plain torch, one sequence at a time, for soft caps and sinks. The softmax is in fp32 or wider."""
    group = q.shape[1] // k.shape[1]
    accurate = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    for queries, keys in _segments(call):
        sq = q[queries].transpose(0, 1)
        sk, sv = (t[keys].transpose(0, 1).repeat_interleave(group, dim=0) for t in (k, v))
        scores = (sq @ sk.transpose(1, 2)).to(accurate) * parameters.scale  # [heads, q, k]
        if parameters.softcap is not None:
            scores = parameters.softcap * torch.tanh(scores / parameters.softcap)
        seen = _mask(sq.shape[1], sk.shape[1], call.is_causal, parameters.window, q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        if parameters.sinks is not None:
            sinks = parameters.sinks.to(accurate)[:, None, None].expand(-1, sq.shape[1], 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outputs.append((weights.to(v.dtype) @ sv).transpose(0, 1))
    return torch.cat(outputs)


def varlen(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """torch's varlen_attn (FlashAttention), all sequences in one call. CUDA and 16-bit types only."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if value_dim != head_dim:
        v = F.pad(v, (0, head_dim - value_dim))
    if parameters.sinks is not None:
        return _with_sinks("varlen", q, k, v, call, parameters)[..., :value_dim]
    output = varlen_attn(
        q,
        k,
        v,
        call.cu_queries,
        call.cu_keys,
        call.longest_query,
        call.longest_key,
        scale=parameters.scale,
        window_size=_window(call, parameters),
        **_GQA,
    )
    assert isinstance(output, Tensor)  # a tuple only if auxiliary outputs are requested
    return output[..., :value_dim]


def fa3(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """FlashAttention-3 (Shah et al., arXiv:2407.08608), all sequences in one call. Hopper GPUs and 16-bit types
    only."""
    if parameters.sinks is not None:
        return _with_sinks("fa3", q, k, v, call, parameters)
    return flash_attention_3.attention(
        q,
        k,
        v,
        call.cu_queries,
        call.cu_keys,
        call.longest_query,
        call.longest_key,
        softmax_scale=parameters.scale,
        causal=call.is_causal,
        window_size=_window(call, parameters),
    )


def _with_sinks(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters
) -> Tensor:
    starts, longest = (call.cu_queries, call.cu_keys), (call.longest_query, call.longest_key)
    segments = Segments(*starts, *longest, parameters.scale, parameters.window)
    assert parameters.sinks is not None
    return flash_sinks.attention(q, k, v, parameters.sinks, kernel, segments)


def te(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, parameters: AttentionParameters) -> Tensor:
    """TransformerEngine's fused attention over ragged sequences (THD). CUDA and 16-bit types only."""
    attention = _te_attention(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], parameters.scale)
    output = attention(
        q,
        k,
        v,
        qkv_format="thd",
        cu_seqlens_q=call.cu_queries,
        cu_seqlens_kv=call.cu_keys,
        max_seqlen_q=call.longest_query,
        max_seqlen_kv=call.longest_key,
        attn_mask_type="padding_causal_bottom_right",
        window_size=_window(call, parameters),
    )
    return output.view(len(q), q.shape[1], v.shape[-1])


@functools.cache
def _te_attention(heads: int, kv_heads: int, head_dim: int, value_dim: int, scale: float) -> Any:
    from transformer_engine.pytorch import DotProductAttention  # an optional dependency

    dims: Any = head_dim if value_dim == head_dim else (head_dim, value_dim)
    return DotProductAttention(heads, dims, num_gqa_groups=kv_heads, qkv_format="thd", softmax_scale=scale)


BACKENDS: dict[Attention, Backend] = {"sdpa": sdpa, "eager": eager, "varlen": varlen, "fa3": fa3, "te": te}
"""The backends by name. `ATTENTION` lists their limits."""


def _registered(name: str) -> str:
    return f"automodel_rl_{name}"


def _segments(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Yields the slices of queries and keys of every sequence."""
    ends = zip(itertools.accumulate(call.query_lengths), itertools.accumulate(call.key_lengths), strict=True)
    last_q = last_k = 0
    for end_q, end_k in ends:
        yield slice(last_q, end_q), slice(last_k, end_k)
        last_q, last_k = end_q, end_k


def _window(call: AttentionCall, parameters: AttentionParameters) -> tuple[int, int]:
    """Returns how many keys before and after its own a query sees; -1 for all."""
    return -1 if parameters.window is None else parameters.window - 1, 0 if call.is_causal else -1


def _mask(num_queries: int, num_keys: int, is_causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Returns True where a query sees a key, bool [q, k], aligned at the bottom right."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    seen = seen.tril(num_keys - num_queries) if is_causal else seen
    return seen if window is None else seen.triu(num_keys - num_queries - window + 1)
