"""The fused attention backends against SDPA in float64, on CUDA: whole microbatches, windows, and queries of a later
chunk; with sinks against attention written out."""

import importlib.util

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import AttentionCall, TokenSequence, local_microbatch, pack_microbatch
from automodel_rl.model import flash_attention_3
from automodel_rl.model.attention import BACKENDS, AttentionParameters, Backend, eager, sdpa

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
if HAS_TE:  # before anything loads cuDNN, of which it may bring parts of another version
    import transformer_engine.pytorch  # noqa: F401

pytestmark = pytest.mark.gpu
LENGTHS = (1, 700, 33, 2, 1289)
DEVICE = torch.device("cuda")


@pytest.fixture(params=["varlen", "fa3", "te"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "te" and not HAS_TE:
        pytest.skip("needs TransformerEngine")
    if request.param == "fa3" and (obstacle := flash_attention_3.obstacle(128, 128, DEVICE)):
        pytest.skip(obstacle)
    return BACKENDS[request.param]


def calls(cp: int) -> list[AttentionCall]:
    """Every call of every rank that shares a microbatch."""
    sequences = [TokenSequence(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)) for n in LENGTHS]
    microbatches = [local_microbatch(pack_microbatch(sequences), cp, rank) for rank in range(cp)]
    return [call.to(DEVICE) for microbatch in microbatches for call in microbatch.calls]


def make_inputs(call: AttentionCall, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((sum(call.query_lengths), 16), (sum(call.key_lengths), 8), (sum(call.key_lengths), 8))
    return [torch.randn(*size, 128, generator=generator, device=DEVICE).to(dtype).requires_grad_() for size in sizes]


def run(backend: Backend, inputs: list[Tensor], call: AttentionCall, window: int | None) -> list[Tensor]:
    output = backend(*inputs, call, AttentionParameters(128**-0.5, window))
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(output.shape, generator=generator, device=DEVICE).to(output.dtype)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cp", [1, 2])
def test_equals_sdpa_within_bf16_rounding(backend: Backend, cp: int, window: int | None) -> None:
    if backend is BACKENDS["te"] and cp > 1 and window:
        pytest.skip("refused: TransformerEngine has no such kernel")
    for call in calls(cp):
        inputs = make_inputs(call, torch.bfloat16)
        exact = run(sdpa, [t.detach().double().requires_grad_() for t in inputs], call, window)
        for actual, expected in zip(run(backend, inputs, call, window), exact, strict=True):
            assert (actual.double() - expected).norm() / expected.norm() < 5e-3


def test_documents_do_not_see_each_other(backend: Backend) -> None:
    (call,) = calls(1)
    inputs = make_inputs(call, torch.bfloat16)
    start = LENGTHS[0] + LENGTHS[1]
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed:
        tensor[:start] += 1
    output, other = (backend(*tensors, call, AttentionParameters(0.1)) for tensors in (inputs, changed))
    assert torch.equal(output[start:], other[start:])
    assert not torch.equal(output[:start], other[:start])


def with_sinks(backend: Backend, inputs: list[Tensor], call: AttentionCall, window: int | None) -> list[Tensor]:
    """The output, and the gradients of query, key, value and sinks."""
    output = backend(*inputs[:3], call, AttentionParameters(64**-0.5, window, sinks=inputs[3]))
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(output.shape, generator=generator, device=DEVICE).to(output.dtype)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cp", [1, 2])
def test_sinks_are_closer_to_the_mathematics_than_bf16_attention_written_out(
    backend: Backend, cp: int, window: int | None
) -> None:
    if backend is BACKENDS["te"]:
        pytest.skip("refused: TransformerEngine does not support sinks")
    for call in calls(cp):
        inputs = [t.detach()[..., :64].contiguous().requires_grad_() for t in make_inputs(call, torch.bfloat16)]
        generator = torch.Generator("cuda").manual_seed(2)
        inputs.append(torch.randn(16, generator=generator, device=DEVICE).to(torch.bfloat16).requires_grad_())
        exact = with_sinks(eager, [t.detach().double().requires_grad_() for t in inputs], call, window)
        plain = with_sinks(eager, inputs, call, window)
        for ours, theirs, expected in zip(with_sinks(backend, inputs, call, window), plain, exact, strict=True):
            error, allowed = ((t.double() - expected).norm() / expected.norm() for t in (ours, theirs))
            assert error < max(1.1 * allowed, torch.tensor(5e-3, device=DEVICE))
