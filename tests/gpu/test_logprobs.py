"""Chunked log-probabilities on CUDA: 16-bit inputs, fp32 logits, little memory."""

import dataclasses

import pytest
import torch

from automodel_rl.batch import TokenSequence, local_microbatch, pack_microbatch
from automodel_rl.batch.tensors import LOGPROB_GRADIENT
from automodel_rl.losses import Readout
from automodel_rl.model.head import Head
from automodel_rl.model.logprobs import target_readout

pytestmark = pytest.mark.gpu


def make_inputs(num_tokens: int, vocab: int, hidden: int):
    generator = torch.Generator("cuda").manual_seed(0)
    states = torch.randn(num_tokens, hidden, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator, device="cuda") * 0.05).bfloat16().requires_grad_()
    ids = torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(0))
    microbatch = local_microbatch(pack_microbatch([TokenSequence(ids, torch.ones(num_tokens, dtype=torch.bool))]))
    return states, weight, microbatch.to(torch.device("cuda"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_bf16_inputs_give_fp32_logprobs_close_to_float64(compiled: bool, known: bool) -> None:
    states, weight, microbatch = make_inputs(1500, 32000, 256)
    if known:
        ones = torch.ones(1500, dtype=torch.float64, device="cuda")
        microbatch = dataclasses.replace(microbatch, tokens={LOGPROB_GRADIENT: ones})
    total = torch.zeros(weight.shape, device="cuda")
    head = Head(weight.detach(), gradient=lambda: total, compiled=compiled)
    logprobs = target_readout(states, head, microbatch, Readout())[:, 0]
    logprobs.sum().backward()
    exact_states, exact_weight = (t.detach().double().requires_grad_() for t in (states, weight))
    logits = (exact_states @ exact_weight.t())[:-1]
    exact = logits.log_softmax(-1).gather(1, microbatch.targets[:-1, None])[:, 0]
    exact.sum().backward()
    assert logprobs.dtype == torch.float32
    assert (logprobs[:-1] - exact).abs().max() < 2e-5
    for actual, expected in ((states.grad, exact_states.grad), (total, exact_weight.grad)):
        assert (actual.double() - expected).norm() / expected.norm() < 1e-2


def test_memory_is_far_below_all_logits() -> None:
    states, weight, microbatch = make_inputs(16384, 151936, 256)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        target_readout(states, Head(weight), microbatch, Readout(0.7, entropy=True))
    # A block of logits, and what is made of a part of it at once.
    assert torch.cuda.max_memory_allocated() - before < 0.07 * 16384 * 151936 * 4
