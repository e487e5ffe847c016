"""Sinks on a flash kernel against attention written out, in float64: outputs and all gradients, sequences of any
length, windows, fewer queries than keys."""

import dataclasses

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import AttentionCall
from automodel_rl.compat.flash_kernels import KERNELS, FlashKernel, Segments
from automodel_rl.model import flash_sinks
from automodel_rl.model.attention import AttentionParameters, eager, varlen

HEADS, KV_HEADS, DIM = 4, 2, 8


def scores(q: Tensor, k: Tensor, segments: Segments) -> Tensor:
    """Scores of all queries and keys, -inf where a query does not see a key, [heads, q, k]."""
    place, sequence = [], []
    for starts in (segments.cu_queries, segments.cu_keys):
        lengths = starts.diff()
        sequence.append(torch.arange(len(lengths)).repeat_interleave(lengths))
        place.append(torch.arange(int(starts[-1])) - starts[1:].repeat_interleave(lengths))  # from the end, below 0
    distance = place[0][:, None] - place[1]
    seen = (distance >= 0) & (sequence[0][:, None] == sequence[1])
    if segments.window is not None:
        seen &= distance < segments.window
    keys = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return (torch.einsum("qhd,khd->hqk", q, keys) * segments.scale).masked_fill(~seen, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    weights = scores(q, k, segments)
    values = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1), values), weights.logsumexp(-1)


def backward(
    d_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """As FlashAttention 2 does it (Dao, arXiv:2307.08691, algorithm 2): from the output and the log-sum-exp alone."""
    group = HEADS // KV_HEADS
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    weights = torch.exp(scores(q, k, segments) - lse[..., None])
    row_sums = (d_output * output).sum(-1).t()[..., None]
    d_scores = weights * (torch.einsum("qhd,khd->hqk", d_output, values) - row_sums) * segments.scale
    d_values = torch.einsum("hqk,qhd->khd", weights, d_output)
    d_keys = torch.einsum("hqk,qhd->khd", d_scores, q)
    d_queries = torch.einsum("hqk,khd->qhd", d_scores, keys)
    grads = d_queries, *(t.unflatten(1, (KV_HEADS, group)).sum(2) for t in (d_keys, d_values))
    return tuple(torch.empty_like(t).copy_(grad) for t, grad in zip((q, k, v), grads, strict=True))  # its strides, too


@pytest.fixture(autouse=True)
def kernel_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "varlen", FlashKernel(forward, backward))


def make_call(query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> AttentionCall:
    starts = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (query_lengths, key_lengths)]
    return AttentionCall(None, None, *starts, query_lengths, key_lengths)


def test_compiled_layers_hold_it_in_their_graphs() -> None:
    """Queries as layers give them, heads before tokens, and the same starts for queries and keys."""
    call = make_call((5, 1, 17), (5, 1, 17))
    q, k, v = (
        torch.randn(heads, 23, DIM, dtype=torch.float64).transpose(0, 1) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, torch.randn(HEADS, dtype=torch.float64))]
    segments = Segments(call.cu_queries, call.cu_queries, 17, 17, 0.3, None)
    torch.library.opcheck(flash_sinks._attention, (*inputs, "varlen", *segments[:5], -1))


@pytest.mark.parametrize("value_dim", [DIM, 5])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("query_lengths", [(5, 1, 17, 40), (2, 1, 9, 7)], ids=["whole", "of a later chunk"])
def test_output_and_gradients_equal_attention_written_out(
    query_lengths: tuple[int, ...], window: int | None, value_dim: int
) -> None:
    call = make_call(query_lengths, (5, 1, 17, 40))
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(query_lengths), HEADS, DIM), (63, KV_HEADS, DIM), (63, KV_HEADS, value_dim), (HEADS,)]
    inputs = [torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_() for size in sizes]
    weight = torch.randn(sum(query_lengths), HEADS, value_dim, dtype=torch.float64, generator=generator)
    found = []
    for backend in (varlen, eager):
        parameters = AttentionParameters(0.3, window, sinks=inputs[3])
        output = backend(*inputs[:3], call, parameters)
        found.append([output, *torch.autograd.grad((output * weight).sum(), inputs)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    without = eager(*inputs[:3], call, dataclasses.replace(parameters, sinks=None))
    assert (found[0][0] - without).abs().max() > 0.1  # the sinks matter
