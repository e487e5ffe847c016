"""varlen_attn against SDPA over each sequence, on CUDA."""

import pytest
import torch

from automodel_rl.batch import TokenSequence, pack_row
from automodel_rl.model.attention import sdpa_attention, varlen_attention

pytestmark = pytest.mark.gpu
LENGTHS = (1, 700, 33, 2, 1289)


def make_inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], object]:
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (16, 8, 8)
    inputs = [torch.randn(1, h, sum(LENGTHS), 128, generator=generator, device="cuda", dtype=dtype) for h in heads]
    sequences = [TokenSequence(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)) for n in LENGTHS]
    return [tensor.requires_grad_() for tensor in inputs], pack_row(sequences).to(torch.device("cuda"))


def run(function, inputs, batch):
    output, _ = function(None, *inputs, None, batch=batch, scaling=128**-0.5)
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(output.shape, generator=generator, device="cuda").to(output.dtype)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


def test_varlen_equals_sdpa_within_bf16_rounding() -> None:
    inputs, batch = make_inputs(torch.bfloat16)
    exact = run(sdpa_attention, [t.detach().double().requires_grad_() for t in inputs], batch)
    for actual, expected in zip(run(varlen_attention, inputs, batch), exact, strict=True):
        assert (actual.double() - expected).norm() / expected.norm() < 5e-3


def test_documents_do_not_see_each_other() -> None:
    inputs, batch = make_inputs(torch.bfloat16)
    output, _ = varlen_attention(None, *inputs, None, batch=batch, scaling=0.1)
    changed = [t.detach().clone() for t in inputs]
    for tensor in changed:
        tensor[:, :, : LENGTHS[0] + LENGTHS[1]] += 1
    other, _ = varlen_attention(None, *changed, None, batch=batch, scaling=0.1)
    start = LENGTHS[0] + LENGTHS[1]
    assert torch.equal(output[:, start:], other[:, start:])
    assert not torch.equal(output[:, :start], other[:, :start])
