"""Layers with a state: their rules over packed sequences, and the convolution before them."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from automodel_rl.errors import InputError
from automodel_rl.model.token_mixers import gated_delta_net, kimi_delta, mamba2
from automodel_rl.model.token_mixers.gated_delta_net import CHUNK, GatedDeltaNet, chunked_rule
from automodel_rl.model.token_mixers.mamba2 import Mamba2
from automodel_rl.model.token_mixers.whole_sequences import convolve
from automodel_rl.tools.verify.one_process import delta_rule, state_space

LENGTHS = (CHUNK + 7, 1, 2 * CHUNK, 5)

RULES = {"gated delta": (gated_delta_net, 2, 1), "Kimi delta": (kimi_delta, 1, 8)}
"""Modules with a rule, how many value heads a key head has, and how many decays a head has."""


def around(chunk: int) -> tuple[int, ...]:
    """Lengths of sequences with chunks that are full, that lack a token, and that have one alone."""
    return (chunk + 7, 1, 2 * chunk, chunk + 1, 5, chunk - 1, 2 * chunk + 1, chunk)


def inputs(total: int, groups: int, num_decays: int) -> list[Tensor]:
    """Queries, keys, values, logs of decays and rates of two key heads."""
    generator = torch.Generator().manual_seed(0)
    decays = (2 * groups,) if num_decays == 1 else (2 * groups, num_decays)
    shapes = [(2, 8), (2, 8), (2 * groups, 6), decays, (2 * groups,)]
    q, k, v, decay, rates = (torch.randn(total, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q, k, v, -decay.exp(), rates.sigmoid()]


def token_by_token(lengths: tuple[int, ...], *tensors: Tensor) -> Tensor:
    split = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    return torch.cat([delta_rule(q[None], k[None], v[None], g=g[None], beta=b[None])[0][0] for q, k, v, g, b in split])


@pytest.mark.parametrize("rule", RULES)
def test_sequences_of_many_chunks_and_of_one_token_equal_the_rule_token_by_token(rule: str) -> None:
    module, *sizes = RULES[rule]
    lengths = around(module.CHUNK)
    results = []
    for function in (lambda *tensors: module.chunked_rule(*tensors, lengths), partial(token_by_token, lengths)):
        tensors = [tensor.requires_grad_() for tensor in inputs(sum(lengths), *sizes)]
        output = function(*tensors)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        results.append([output, *torch.autograd.grad((output * weights).sum(), tensors)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_state_space_equals_its_recurrence_token_by_token() -> None:
    lengths = around(mamba2.CHUNK)
    generator = torch.Generator().manual_seed(0)
    total, heads = sum(lengths), 4
    values, keys, queries, steps = (
        torch.randn(total, *shape, generator=generator, dtype=torch.float64)
        for shape in ((heads, 6), (heads, 8), (heads, 8), (heads,))
    )
    rates, zeros = -torch.rand(heads, generator=generator, dtype=torch.float64), torch.zeros(heads).double()
    taken = F.softplus(steps)
    found = mamba2.chunked_rule(queries, keys, values * taken[..., None], rates * taken, lengths)
    expected = [
        state_space(x[None], dt[None], rates, b[None], c[None], D=zeros, dt_bias=zeros, dt_limit=(0.0, math.inf))
        for x, dt, b, c in zip(*(part.split(lengths) for part in (values, steps, keys, queries)), strict=True)
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
