"""Chunked log-probabilities: exact values and gradients, with a tenth of the memory."""

import dataclasses
import resource
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, TokenSequence, local_microbatch, pack_microbatch
from automodel_rl.batch.tensors import LOGPROB_GRADIENT, READ_IDS
from automodel_rl.block_sizes import block_sizes
from automodel_rl.losses import Readout, TokenOutputs
from automodel_rl.model.head import Head
from automodel_rl.model.logprobs import target_readout, top_logits, top_logprobs
from tests.processes import run_command

SEVEN_TOKENS = 32 * 7 * 40 * 8
"""Setting for blocks of 7 tokens in float64, on a CPU, with a vocabulary of 40."""


def make_inputs(num_tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, LocalMicrobatch]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_tokens, hidden, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator, dtype=dtype).mul_(0.3).requires_grad_()
    ids = torch.randint(0, vocab, (num_tokens,), generator=generator)
    third = num_tokens // 3
    pieces = [ids[:third], ids[third:]]
    batch = pack_microbatch([TokenSequence(p, torch.ones(len(p), dtype=torch.bool)) for p in pieces])
    return states, weight, local_microbatch(batch)


def chunked(states: Tensor, weight: Tensor, microbatch: LocalMicrobatch, softcap: float | None = None) -> Tensor:
    return target_readout(states, Head(weight, softcap), microbatch, Readout())[:, 0]


def naive(states: Tensor, weight: Tensor, microbatch: LocalMicrobatch, softcap: float | None = None) -> Tensor:
    logits = states @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    scores = logits.log_softmax(-1).gather(1, microbatch.targets.clamp_min(0)[:, None])[:, 0]
    return scores * (microbatch.targets >= 0)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_and_gradients_equal_the_naive_way(monkeypatch: pytest.MonkeyPatch, softcap: float | None) -> None:
    monkeypatch.setattr(block_sizes, "head_bytes", SEVEN_TOKENS)
    upstream = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for function in (chunked, naive):
        states, weight, batch = make_inputs(30, 8, 40, torch.float64)
        values = function(states, weight, batch, softcap)
        (values * upstream).sum().backward()
        results.append((values, states.grad, weight.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropy_and_temperature_equal_the_naive_way(
    monkeypatch: pytest.MonkeyPatch, temperature: float, softcap: float | None
) -> None:
    monkeypatch.setattr(block_sizes, "head_bytes", SEVEN_TOKENS)
    upstream = torch.randn(30, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    states, weight, microbatch = make_inputs(30, 8, 40, torch.float64)
    scores = target_readout(states, Head(weight, softcap), microbatch, Readout(temperature, entropy=True))
    actual = [scores, *torch.autograd.grad((scores * upstream).sum(), (states, weight))]
    logits = states @ weight.t()
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    softmax = torch.distributions.Categorical(logits=logits)
    expected_scores = torch.stack([softmax.log_prob(microbatch.targets.clamp_min(0)), softmax.entropy()], dim=1)
    expected_scores = expected_scores * (microbatch.targets >= 0)[:, None]
    expected = [expected_scores, *torch.autograd.grad((expected_scores * upstream).sum(), (states, weight))]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("adds", [False, True])
def test_a_gradient_known_before_the_forward_equals_that_of_autograd(
    monkeypatch: pytest.MonkeyPatch, adds: bool
) -> None:
    monkeypatch.setattr(block_sizes, "head_bytes", SEVEN_TOKENS)
    known = torch.randn(70, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    states, weight, microbatch = make_inputs(70, 8, 40, torch.float64)
    values = chunked(states, weight, microbatch, 1.5)
    expected = [values, *torch.autograd.grad((values * known).sum(), (states, weight))]
    informed = dataclasses.replace(microbatch, tokens={LOGPROB_GRADIENT: known})
    if not adds:
        values = chunked(states, weight, informed, 1.5)
        actual = [values, *torch.autograd.grad((values * known).sum(), (states, weight))]
    else:
        before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        total = before.clone()
        head = Head(weight.detach(), 1.5, gradient=lambda: total)
        values = target_readout(states, head, informed, Readout())[:, 0]
        actual = [values, *torch.autograd.grad((values * known).sum(), (states,)), total - before]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def ids_of(num_tokens: int, vocab: int, width: int) -> Tensor:
    """Token ids for each place: none for some, and the same id twice."""
    ids = torch.randint(-1, vocab, (num_tokens, width), generator=torch.Generator().manual_seed(3))
    ids[:, 1] = ids[:, 0]
    return ids


def naive_at(logits: Tensor, microbatch: LocalMicrobatch, ids: Tensor) -> Tensor:
    wanted = torch.cat([microbatch.targets[:, None], ids], dim=1)
    logprobs = logits.log_softmax(-1).gather(1, wanted.clamp_min(0))
    return logprobs * ((wanted >= 0) & (microbatch.targets >= 0)[:, None])


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (1.5, 0.6)])
def test_logprobs_of_given_ids_equal_the_naive_way(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, temperature: float, entropy: bool
) -> None:
    monkeypatch.setattr(block_sizes, "head_bytes", SEVEN_TOKENS)
    states, weight, microbatch = make_inputs(30, 8, 40, torch.float64)
    ids = ids_of(30, 40, 5)
    informed = dataclasses.replace(microbatch, tokens={READ_IDS: ids})
    readout = Readout(temperature, entropy, "ids")
    columns = target_readout(states, Head(weight, softcap), informed, readout)
    outputs = TokenOutputs.from_columns(columns, readout)
    logits = states @ weight.t()
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    expected = naive_at(logits, microbatch, ids)
    assert outputs.ids_logprobs is not None
    torch.testing.assert_close(outputs.logprobs, expected[:, 0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(outputs.ids_logprobs, expected[:, 1:], rtol=1e-12, atol=1e-13)
    if entropy:
        assert outputs.entropy is not None
        of_softmax = torch.distributions.Categorical(logits=logits).entropy() * (microbatch.targets >= 0)
        torch.testing.assert_close(outputs.entropy, of_softmax, rtol=1e-12, atol=1e-13)
        expected = torch.cat([expected, of_softmax[:, None]], dim=1)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((columns * upstream).sum(), (states, weight))
    theirs = torch.autograd.grad((expected * upstream).sum(), (states, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("of_ids", [False, True], ids=["targets", "ids"])
def test_a_gradient_known_before_the_forward_may_be_that_of_given_ids(
    monkeypatch: pytest.MonkeyPatch, of_ids: bool
) -> None:
    monkeypatch.setattr(block_sizes, "head_bytes", SEVEN_TOKENS)
    states, weight, microbatch = make_inputs(30, 8, 40, torch.float64)
    ids = ids_of(30, 40, 5)
    known = torch.randn(30, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = naive_at(states @ weight.t(), microbatch, ids)
    loss = (expected[:, 1:] * known).sum() if of_ids else (expected[:, 0] * known[:, 0]).sum()
    theirs = [expected, *torch.autograd.grad(loss, (states, weight))]
    tokens = {READ_IDS: ids, LOGPROB_GRADIENT: known if of_ids else known[:, 0]}
    informed = dataclasses.replace(microbatch, tokens=tokens)
    columns = target_readout(states, Head(weight), informed, Readout(ids="ids"))
    ours = [columns, *torch.autograd.grad(columns.sum(), (states, weight))]  # whatever comes from above is known
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    states, weight, batch = make_inputs(6, 3, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda s, w: chunked(s, w, batch), (states, weight))


def test_bf16_states_give_fp32_logprobs() -> None:
    states, weight, batch = make_inputs(20, 8, 40, torch.bfloat16)
    values = chunked(states, weight, batch)
    assert values.dtype == torch.float32
    values.sum().backward()
    assert states.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_top_logits_are_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "head_bytes", SEVEN_TOKENS)
    states, weight, _ = make_inputs(30, 8, 40, torch.float64)
    expected = (states @ weight.t()).topk(3)
    values, ids = top_logits(states.detach(), Head(weight.detach()), 3)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(values, expected.values)
    logprobs, ids = top_logprobs(states.detach(), Head(weight.detach()), 3)
    expected = (states @ weight.t()).log_softmax(1).topk(3)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logprobs, expected.values)


def peak_bytes(function: Callable[..., Tensor]) -> int:
    """Memory that forward and backward add, in a process of their own."""
    done = run_command([sys.executable, "-m", "tests.unit.model.test_logprobs", function.__name__])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _measure(function: Callable[..., Tensor]) -> int:
    torch.set_num_threads(1)
    states, weight, batch = make_inputs(4096, 256, 32000, torch.float32)
    small = pack_microbatch([TokenSequence(torch.arange(8), torch.ones(8, dtype=torch.bool))])
    function(states[:8], weight, local_microbatch(small))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function(states, weight, batch).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_memory_is_a_tenth_of_the_naive_way() -> None:
    ours, theirs = peak_bytes(chunked), peak_bytes(naive)
    print(f"peak memory added: chunked {ours / 2**20:.0f} MiB, naive {theirs / 2**20:.0f} MiB")
    assert ours < theirs / 10


if __name__ == "__main__":
    print(_measure({"chunked": chunked, "naive": naive}[sys.argv[1]]))
