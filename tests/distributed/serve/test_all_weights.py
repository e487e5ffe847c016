"""The service with a model without adapters: one run, of all weights."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from automodel_rl.tools.export import export
from tests.distributed.serve.test_serve import numbers, train_both
from tests.services import Service, datum, of_loss, write_model

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)

WHOLE = {"dtype": "float64"}


def refusal_of_a_second_run(service: Service) -> str:
    """What the server answers. The client of `tinker` would ask again for a minute."""

    def post(path: str, body: dict) -> Any:
        headers = {"X-API-Key": service.key}
        return urllib.request.urlopen(Request(f"{service.url}/api/v1/{path}", json.dumps(body).encode(), headers))

    with post("create_session", {}) as answer:
        session = json.load(answer)["session_id"]
    body = {"session_id": session, "model_seq_id": 1, "base_model": service.model, "lora_config": {"rank": 0}}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post("create_model", body)
    assert refused.value.code == 429
    return refused.value.read().decode()


def test_a_run_of_all_weights_trains_is_sampled_from_and_goes_on(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model)
    settings = {"model": {"path": str(model), **WHOLE}, "parallel": {"pp": 2}}
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    with Service(tmp_path, model, **settings) as service:
        run = service.run(rank=0)
        assert not run.get_info().is_lora
        with pytest.raises(tinker.TinkerError, match="request rank 0"):
            service.run(rank=4)
        assert "the limit is 1: end one, because the server trains all weights" in refusal_of_a_second_run(service)
        train_both(run, plain)
        sampler = run.save_weights_and_get_sampling_client().result()
        with torch.no_grad():
            logits = plain(torch.tensor([[5, 6, 7, 8]])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor([[6], [7], [8]]))[:, 0].tolist()
        assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(expected, abs=1e-6)
        asked = {"sampling_params": types.SamplingParams(max_tokens=5, seed=1), "num_samples": 2}
        before = [s.logprobs for s in sampler.sample(prompt, **asked).result().sequences]
        path = run.save_state("one").result().path
        undisturbed = numbers(run, 60, 2)
        assert [s.logprobs for s in sampler.sample(prompt, **asked).result().sequences] == before
        base = service.client().create_sampling_client(base_model=service.model).result()
        assert base.compute_logprobs(prompt).result()[1:] != pytest.approx(expected, abs=1e-3)
        run.forward_backward([of_loss(datum(9, 0), "weights")], "cross_entropy").result()  # whose gradients must go
        run.load_state_with_optimizer(path).result()
        assert numbers(run, 60, 2) == undisturbed
        os.kill(service.job.process.pid, signal.SIGKILL)
        service.job.process.wait()
    export(service.folder_of(path), tmp_path / "exported", [])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    for name, parameter in plain.named_parameters():
        assert (parameter - exported.get_parameter(name)).abs().max() < 1e-9, name
    with Service(tmp_path, model, **{**settings, "parallel": {"dp_shard": 2}}) as service:
        resumed = service.client().create_training_client_from_state_with_optimizer(path).result()
        again = numbers(resumed, 60, 2)
        assert again[0][0]["loss:sum"] == pytest.approx(undisturbed[0][0]["loss:sum"], rel=1e-9)
        assert again[4][0]["loss:sum"] == pytest.approx(undisturbed[4][0]["loss:sum"], rel=1e-9)
