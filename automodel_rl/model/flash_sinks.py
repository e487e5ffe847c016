"""Attention sinks on flash kernels without them: memory linear in the tokens, exact gradients.

A sink is one additional score s per head, whose key has no value (Xiao et al., arXiv:2309.17453; gpt-oss). With the
kernel's output O and log-sum-exp L of the real scores, attention with the sink is O' = O * sigmoid(L - s), and its
log-sum-exp L' = log(exp(L) + exp(s)). A flash backward recomputes the weights exp(S - L) and the row sums of dO * O.
Given (O', L') it returns exact gradients of queries, keys and values, because the sink adds nothing to the row sums.
The gradient of s is -sum over queries of sigmoid(s - L) * rowsum(dO * O').

Shape letters: q queries and k keys of one call, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from automodel_rl.compat.flash_kernels import KERNELS, Segments


def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: str, segments: Segments) -> Tensor:
    """Computes attention with a sink per head, [q, heads, D].

    Args:
        q, k, v: query [q, heads, D], key and value [k, KV heads, D].
        sinks: [heads].
        kernel: a key of `KERNELS`.
    """
    window = -1 if segments.window is None else segments.window
    return _attention(q, k, v, sinks, kernel, *segments[:5], window)[0]


_SEGMENTS = "Tensor cu_queries, Tensor cu_keys, SymInt longest_query, SymInt longest_key, float scale, int window"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor sinks, str kernel, {_SEGMENTS}) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor d_output, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor output, Tensor lse, str kernel, "
    f"{_SEGMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


# Custom operators, because torch.compile rejects an autograd.Function whose cu_queries and cu_keys are one tensor.
@torch.library.custom_op("automodel_rl::flash_sinks", mutates_args=(), schema=_FORWARD)
def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: str, *segments: Any) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp with the sinks [heads, q]. A window of -1 is none."""
    output, lse = KERNELS[kernel].forward(q, k, v, _segments(*segments))
    scores = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - scores).t().contiguous()  # of the real keys, [q, heads]
    return (output.contiguous() * share[..., None]).to(q.dtype), torch.logaddexp(lse, scores)


@_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    accurate = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=accurate)


@torch.library.custom_op("automodel_rl::flash_sinks_backward", mutates_args=(), schema=_BACKWARD)
def _gradients(d_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v, sinks, output, lse, kernel, *segments = rest
    row_sums = (d_output.to(lse.dtype) * output).sum(-1).t()  # [heads, q]
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # of the sink
    grads = KERNELS[kernel].backward(d_output.contiguous(), q, k, v, output, lse, _segments(*segments))
    return *grads, -(share * row_sums).sum(1).to(sinks.dtype)


@_gradients.register_fake
def _(d_output: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in rest[:4])


def _segments(*fields: Any) -> Segments:
    *others, window = fields
    return Segments._make((*others, None if window < 0 else window))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ctx.kernel, cu_queries, cu_keys, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, cu_queries, cu_keys)


def _backward(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, cu_queries, cu_keys = ctx.saved_tensors
    grads = _gradients(d_output, *tensors, ctx.kernel, cu_queries, cu_keys, *ctx.rest)
    return *grads, *(None,) * 7


_attention.register_autograd(_backward, setup_context=_keep)
