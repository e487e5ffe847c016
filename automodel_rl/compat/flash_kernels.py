"""Flash kernels with their log-sum-exp: torch's FlashAttention 2, and FlashAttention-3. No other file uses their
private operators.

Checked with torch 2.11.0 and 2.13.0 and flash_attn_3 3.0.0.

Shape letters: q queries and k keys of one call, D head dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """The sequences of a call.

    Attributes:
        cu_queries, cu_keys: start of each sequence, and the end of the last, int32 [n + 1].
        longest_query, longest_key: upper bounds of their lengths, in tokens.
        window: number of keys that a query sees, its own included; None for all.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int
    scale: float
    window: int | None


class FlashKernel(NamedTuple):
    """A kernel for causal attention, aligned at the bottom right.

    Attributes:
        forward: (query [q, heads, D], key [k, KV heads, D], value [k, KV heads, D], segments) -> output
            [q, heads, D], log-sum-exp [heads, q] in fp32 or wider.
        backward: (gradient of the output, query, key, value, output, log-sum-exp, segments) -> gradients of query,
            key and value.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Segments], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Segments], tuple[Tensor, Tensor, Tensor]]


def _torch_options(segments: Segments) -> dict[str, Any]:
    left = -1 if segments.window is None else segments.window - 1
    return {"scale": segments.scale, "window_size_left": left, "window_size_right": 0}


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    causal = segments.window is None
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *segments[:4], 0.0, causal, False, **_torch_options(segments)
    )
    return output, lse


def _torch_backward(*tensors_and_segments: Any) -> tuple[Tensor, Tensor, Tensor]:
    d_output, q, k, v, output, lse, segments = tensors_and_segments
    causal = segments.window is None
    unused = q.new_empty(2, dtype=torch.uint64)  # dropout state
    return torch.ops.aten._flash_attention_backward(
        d_output, q, k, v, output, lse, *segments[:4], 0.0, causal, unused, unused, **_torch_options(segments)
    )


def _fa3_options(segments: Segments) -> dict[str, Any]:
    left = -1 if segments.window is None else segments.window - 1
    return {
        "cu_seqlens_q": segments.cu_queries,
        "cu_seqlens_k": segments.cu_keys,
        "max_seqlen_q": segments.longest_query,
        "max_seqlen_k": segments.longest_key,
        "softmax_scale": segments.scale,
        "window_size_left": left,
        "window_size_right": 0,
    }


def _fa3_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward  # an optional dependency

    output, lse, *_ = _flash_attn_forward(q, k, v, causal=segments.window is None, **_fa3_options(segments))
    return output, lse


def _fa3_backward(*tensors_and_segments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_backward  # an optional dependency

    d_output, q, k, v, output, lse, segments = tensors_and_segments
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))  # torch's kernel keeps the strides, too
    causal = segments.window is None
    _flash_attn_backward(
        d_output, q, k, v, output, lse, dq=dq, dk=dk, dv=dv, is_causal=causal, **_fa3_options(segments)
    )
    return dq, dk, dv


KERNELS = {
    "varlen": FlashKernel(_torch_forward, _torch_backward),
    "fa3": FlashKernel(_fa3_forward, _fa3_backward),
}
"""Kernels by backend name: torch's FlashAttention 2, and FlashAttention-3."""
