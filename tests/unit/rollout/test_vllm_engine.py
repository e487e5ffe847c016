"""How vLLM is driven: the worker process and its end, servers over HTTP, and the files that weights travel in.

A stand-in takes vLLM's place here; the real one is run on GPUs by benchmarks/grpo.py.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from automodel_rl.errors import InputError
from automodel_rl.rollout.protocol import Request
from automodel_rl.rollout.vllm_engine import VllmProcess, VllmServers, weights_folder

STAND_IN = """
import json, os
from types import SimpleNamespace as Object

class SamplingParams:
    def __init__(self, *, seed, temperature, logprobs, max_tokens=16, stop_token_ids=None, stop=None):
        assert logprobs == 0
        self.seed, self.temperature = seed, temperature

class LLM:
    def __init__(self, model, *, logprobs_mode, dtype="auto"):
        assert logprobs_mode == "processed_logprobs"
        if model == "missing":
            raise FileNotFoundError("no such model")
        assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE"} & set(os.environ)
        self.loaded = 0

    def generate(self, prompts, parameters, use_tqdm):
        print("noise on stdout")
        outputs = []
        for prompt, p in zip(prompts, parameters):
            ids = [p.seed % 7, self.loaded, len(prompt["prompt_token_ids"])]
            logprobs = [{i: Object(logprob=-p.temperature)} for i in ids]
            reason = {0: "abort", 1: "stop", 2: "length"}[p.seed % 7]
            outputs.append(Object(outputs=[Object(token_ids=ids, logprobs=logprobs, finish_reason=reason)]))
        return outputs

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.loaded = len(os.listdir(kwargs["weights_path"]))

    def reset_prefix_cache(self):
        pass
"""
WEIGHTS = [("a.weight", torch.arange(6.0).view(2, 3)), ("b.weight", torch.ones(4, dtype=torch.bfloat16))]


@pytest.fixture
def python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def make_process(**options: Any) -> VllmProcess:
    return VllmProcess(sys.executable, {"model": "m", **options}, {"max_tokens": 3}, device=None, folder=None)


@pytest.mark.usefixtures("python_path")
def test_a_process_generates_loads_weights_and_says_when_it_is_gone() -> None:
    engine = make_process()
    try:
        requests = [Request([1, 2], seed, 0.5) for seed in (8, 9)]
        first, second = engine.generate(requests)
        assert (first.token_ids, second.token_ids) == ([1, 0, 2], [2, 0, 2])
        assert first.logprobs == [-0.5] * 3
        assert (first.finish, second.finish) == ("stop", "length")
        (aborted,) = engine.generate([Request([1, 2], 7, 0.5)])
        assert (aborted.finish, aborted.error) == ("error", "vLLM ended it: abort")
        engine.load_weights(iter(WEIGHTS))
        assert engine.generate(requests)[0].token_ids == [1, 1, 2]
        os.kill(engine.child.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="its process ended with code -9"):
            engine.generate(requests)
    finally:
        engine.close()


@pytest.mark.usefixtures("python_path")
@pytest.mark.parametrize(
    ("python", "model", "message"),
    [
        ("/no/such/python", "m", "rollout.vllm.python=/no/such/python: cannot start it"),
        (sys.executable, "missing", "does not start .FileNotFoundError: no such model"),
    ],
)
def test_an_engine_that_does_not_start_is_bad_input(python: str, model: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        VllmProcess(python, {"model": model}, {}, device=None, folder=None)


def test_weights_travel_in_files_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_rl.rollout.vllm_engine.SHARD_BYTES", 16)
    with weights_folder(iter(WEIGHTS)) as folder:
        files = sorted(folder.iterdir())
        assert len(files) == 2
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert not folder.exists()
    for name, tensor in WEIGHTS:
        assert torch.equal(stored[name], tensor)


class Server(BaseHTTPRequestHandler):
    mode = "processed_logprobs"
    loaded: ClassVar[list[list[str]]] = []

    def do_GET(self) -> None:
        if self.path.startswith("/server_info"):
            self._answer({"vllm_config": {"model_config": {"logprobs_mode": self.mode}}})
        else:
            self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            Server.loaded.append(sorted(os.listdir(body["kwargs"]["weights_path"])))
            self._answer({"results": []})
        elif self.path == "/reset_prefix_cache":
            self._answer(None)
        elif body["prompt"] == [13]:
            self.send_error(500)
        else:
            assert body["model"] == "served"
            assert body["top_p"] == body["repetition_penalty"] == 1
            ids = [*body["prompt"], body["seed"]]
            logprobs = {"token_logprobs": [-body["temperature"]] * len(ids)}
            self._answer({"choices": [{"finish_reason": "length", "token_ids": ids, "logprobs": logprobs}]})

    def _answer(self, value: Any) -> None:
        text = b"" if value is None else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_servers_answer_requests_one_by_one(url: str) -> None:
    engine = VllmServers([url, url + "/"], {"max_tokens": 3}, sends_weights=True, folder=None)
    good, bad = engine.generate([Request([5], 7, 0.5), Request([13], 7, 0.5)])
    assert good.token_ids == [5, 7]
    assert good.logprobs == [-0.5, -0.5]
    assert good.finish == "length"
    assert bad.finish == "error"
    assert "500" in bad.error
    with pytest.raises(RuntimeError, match="every request failed, the first with: .*500"):
        engine.generate([Request([13], 7, 0.5)])
    Server.loaded.clear()
    engine.load_weights(iter(WEIGHTS))
    VllmServers([url], {}, sends_weights=False, folder=None).load_weights(iter(WEIGHTS))
    assert Server.loaded == [["model-0.safetensors"]] * 2


def test_servers_that_are_not_there_or_report_raw_logprobs_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="http://127.0.0.1:9 does not answer"):
        VllmServers(["http://127.0.0.1:9"], {}, sends_weights=True, folder=None)
    monkeypatch.setattr(Server, "mode", "raw_logprobs")
    with pytest.raises(InputError, match="reports raw log-probabilities, .* start it with --logprobs-mode"):
        VllmServers([url], {}, sends_weights=True, folder=None)
