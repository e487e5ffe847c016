"""Sampling by vLLM in the service. A stand-in that computes with PEFT takes vLLM's place."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tinker import types

from automodel_rl.generators.vllm_child import WORKER
from tests.services import Service, datum, of_loss, write_model
from tests.vllm_stand_in import write_vllm

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])


def train(run: Any, seed: int) -> None:
    """A step that changes what the model writes."""
    run.forward_backward([of_loss(datum(20, seed), "weights")], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=0.1)).result()


def check_samples(sampler: Any) -> list[list[int]]:
    """Checks that log-probabilities of samples are those that the trained model gives. Returns the samples' tokens."""
    asked = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    found = sampler.sample(PROMPT, num_samples=3, sampling_params=asked).result().sequences
    for sequence in found:
        whole = types.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
        scored = sampler.compute_logprobs(whole).result()[PROMPT.length :]
        assert sequence.logprobs == pytest.approx(scored, abs=1e-5)
    return [list(sequence.tokens) for sequence in found]


def check_every_run(service: Service) -> None:
    """Samples are those of the weights of each run, at its rank."""
    samplers = {"base": service.client().create_sampling_client(base_model=service.model)}
    for rank in (2, 8):  # each with a scale of its own
        run = service.run(rank=rank, seed=rank)
        train(run, rank)
        samplers[f"rank {rank}"] = run.save_weights_and_get_sampling_client()
    written = {name: check_samples(sampler) for name, sampler in samplers.items()}
    assert len({str(tokens) for tokens in written.values()}) == 3
    assert {name: check_samples(sampler) for name, sampler in samplers.items()} == written


def check_ends(service: Service) -> None:
    """Samples end as each request asks."""
    sampler = service.client().create_sampling_client(base_model=service.model)

    def sample(**asked: Any) -> Any:
        params = types.SamplingParams(temperature=0.0, **asked)
        return sampler.sample(PROMPT, num_samples=1, sampling_params=params)

    free = sample(max_tokens=8).result().sequences[0].tokens
    sent = [sample(max_tokens=3), sample(max_tokens=8, stop=[free[1]]), sample(max_tokens=5)]
    short, stopped, longer = (future.result().sequences[0] for future in sent)
    assert (short.tokens, short.stop_reason) == (free[:3], "length")
    assert (stopped.tokens, stopped.stop_reason) == (free[: free.index(free[1]) + 1], "stop")
    assert longer.tokens == free[:5]


def check_kill(service: Service) -> None:
    """A killed vLLM is started again with the weights that samples ask for."""
    run, other = service.run(rank=4, seed=1), service.run(rank=4, seed=2)
    train(run, 5)
    sampler = run.save_weights_and_get_sampling_client()
    written = check_samples(sampler)
    train(other, 6)  # the trained model now has other weights than vLLM
    killed = [child for child in _children(service) if str(WORKER) in child.cmdline()]
    assert len(killed) == 2, "one beside each rank"
    os.kill(killed[0].pid, signal.SIGKILL)
    asked = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    found = sampler.sample(PROMPT, num_samples=3, sampling_params=asked).result().sequences
    assert [list(sequence.tokens) for sequence in found] == written
    assert check_samples(sampler) == written
    train(run, 7)  # nothing is lost
    assert "a generator failed" in service.job.stderr


def _children(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.job.process.pid).children(recursive=True)


def test_vllm_samples_as_each_request_asks_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    write_vllm(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), *sys.path]))
    with Service(tmp_path, tmp_path / "model", generator="vllm") as service:
        check_every_run(service)
        check_ends(service)
        check_kill(service)
