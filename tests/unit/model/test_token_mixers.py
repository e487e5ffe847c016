"""Layers with a state: their rules over packed sequences, and the convolution before them."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from automodel_rl.errors import InputError
from automodel_rl.model.token_mixers import mamba2
from automodel_rl.model.token_mixers.gated_delta_net import CHUNK, GatedDeltaNet, chunked_rule
from automodel_rl.model.token_mixers.mamba2 import Mamba2
from automodel_rl.model.token_mixers.whole_sequences import convolve
from automodel_rl.tools.verify.one_process import delta_rule, state_space

LENGTHS = (CHUNK + 7, 1, 2 * CHUNK, 5)


def inputs() -> list[Tensor]:
    """Queries, keys, values, logs of decays and rates, with two value heads for each key head."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 8), (2, 8), (4, 6), (4,), (4,)]
    q, k, v, decay, rates = (
        torch.randn(sum(LENGTHS), *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return [q, k, v, -decay.exp(), rates.sigmoid()]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
    q, k = (tensor.repeat_interleave(2, dim=1) for tensor in (q, k))
    split = zip(*(tensor.split(LENGTHS) for tensor in (q, k, v, decay, rates)), strict=True)
    outputs = [delta_rule(a[None], b[None], c[None], g=d[None], beta=e[None])[0][0] for a, b, c, d, e in split]
    return torch.cat(outputs)


def test_sequences_of_many_chunks_and_of_one_token_equal_the_rule_token_by_token() -> None:
    results = []
    for function in (lambda *tensors: chunked_rule(*tensors, LENGTHS), token_by_token):
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        output = function(*tensors)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        results.append([output, *torch.autograd.grad((output * weights).sum(), tensors)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_state_space_equals_its_recurrence_token_by_token() -> None:
    generator = torch.Generator().manual_seed(0)
    total, heads = sum(LENGTHS), 4
    values, keys, queries, steps = (
        torch.randn(total, *shape, generator=generator, dtype=torch.float64)
        for shape in ((heads, 6), (heads, 8), (heads, 8), (heads,))
    )
    rates, zeros = -torch.rand(heads, generator=generator, dtype=torch.float64), torch.zeros(heads).double()
    taken = F.softplus(steps)
    found = mamba2.chunked_rule(queries, keys, values * taken[..., None], rates * taken, LENGTHS)
    expected = [
        state_space(x[None], dt[None], rates, b[None], c[None], D=zeros, dt_bias=zeros, dt_limit=(0.0, math.inf))
        for x, dt, b, c in zip(*(part.split(LENGTHS) for part in (values, steps, keys, queries)), strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected, dim=1)[0], rtol=1e-9, atol=1e-10)


def test_the_convolution_sees_no_other_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(LENGTHS), 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    bias = torch.randn(6, generator=generator, dtype=torch.float64)
    offsets = torch.cat([torch.arange(length) for length in LENGTHS])
    expected = [
        F.conv1d(F.pad(piece.t()[None], (3, 0)), weight[:, None], bias, groups=6)[0].t()
        for piece in tokens.split(LENGTHS)
    ]
    torch.testing.assert_close(convolve(tokens, weight, bias, offsets), torch.cat(expected))


@pytest.mark.parametrize(
    ("has_fla", "triton", "message"),
    [(False, "3.7.1", "needs the package fla-core"), (True, "3.6.0", "wrong gradients from Triton 3.6.0")],
)
def test_cuda_without_right_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, has_fla: bool, triton: str, message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if has_fla else None)
    monkeypatch.setattr("importlib.metadata.version", lambda _: triton)
    with pytest.raises(InputError, match=message):
        GatedDeltaNet().choose_rule(torch.device("cuda"), torch.bfloat16)
    assert GatedDeltaNet().choose_rule(torch.device("cuda"), torch.float32) is chunked_rule
    assert Mamba2("mamba").choose_rule(torch.device("cuda"), torch.bfloat16) is mamba2.chunked_rule
