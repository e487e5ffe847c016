"""How vLLM is driven: the worker process and its end, servers over HTTP, and what both are told of weights.

A stand-in takes vLLM's place here; the real one is run on GPUs by benchmarks/grpo.py and benchmarks/weight_sync.py.
"""

import base64
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.rollout.engine_process import EngineProcess
from automodel_rl.rollout.protocol import Request
from automodel_rl.rollout.vllm_engine import VllmServers, start_vllm
from automodel_rl.weight_sync.channel import Channel, Message, expect

STAND_IN = """
import os
from types import SimpleNamespace as Object

import numpy as np

class SamplingParams:
    def __init__(self, *, seed, temperature, logprobs, max_tokens=16, stop_token_ids=None, stop=None):
        assert logprobs == 0
        self.seed, self.temperature = seed, temperature

class LLM:
    def __init__(self, model, *, logprobs_mode, dtype="auto", enable_return_routed_experts=False):
        self.says_routes = enable_return_routed_experts
        assert logprobs_mode == "processed_logprobs"
        if model == "missing":
            raise FileNotFoundError("no such model")
        assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE"} & set(os.environ)
        self.loaded, self.waiting, self.llm_engine, self.open = 0, {}, self, False

    def add_request(self, name, prompt, params):
        if prompt["prompt_token_ids"] == [99]:
            raise ValueError("the prompt is too long")
        self.waiting[name] = [prompt["prompt_token_ids"], params, 3]

    def abort_request(self, names):
        for name in names:
            self.waiting.pop(name, None)

    def step(self):
        print("noise on stdout")
        outputs = []
        for name, request in list(self.waiting.items()):
            prompt, params, left = request
            request[2] -= 1
            if request[2]:
                continue
            del self.waiting[name]
            ids = [params.seed % 7, self.loaded, len(prompt)]
            logprobs = [{i: Object(logprob=-params.temperature)} for i in ids]
            reason = {0: "abort", 1: "stop", 2: "length"}[params.seed % 7]
            routes = np.full((len(prompt) + len(ids) - 1, 2, 1), len(prompt), np.uint8) if self.says_routes else None
            completion = Object(token_ids=ids, logprobs=logprobs, finish_reason=reason, routed_experts=routes)
            outputs.append(Object(finished=True, request_id=name, outputs=[completion]))
        return outputs

    def init_weight_transfer_engine(self, request):
        assert request["init_info"] == {"buffers": []}

    def start_weight_update(self, is_checkpoint_format):
        assert is_checkpoint_format and not self.open
        self.open = True

    def update_weights(self, request):
        assert self.open
        if request["update_info"]["names"] == ["bad"]:
            self.open = False
            raise ValueError("no parameter called bad")
        self.loaded += len(request["update_info"]["names"])

    def finish_weight_update(self):
        assert self.open
        self.open = False

    def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests == bool(self.waiting)
        return True
"""


def tell_update(channel: Channel, version: int, *names: str) -> Message:
    """A whole update in a bucket."""
    channel.tell(("begin", version, 5.0))
    channel.tell(("update", {"names": list(names)}))
    expect(channel, "taken", 5.0)
    channel.tell(("commit", False))
    return expect(channel, "committed", 5.0)


@pytest.fixture
def python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "vllm/__init__.py": STAND_IN,
        "vllm/sampling_params.py": "class RequestOutputKind:\n    FINAL_ONLY = 2\n",
        "vllm/distributed/weight_transfer/factory.py": (
            "class WeightTransferEngineFactory:\n"
            "    @staticmethod\n"
            "    def register_engine(name, module, cls):\n"
            "        assert (name, module, cls) == ('same_device', 'vllm_same_device', 'SameDeviceEngine')\n"
        ),
    }
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def make_process(**options: Any) -> EngineProcess:
    return start_vllm(sys.executable, {"model": "m", **options}, {"max_tokens": 3}, device=None)


@pytest.mark.usefixtures("python_path")
def test_a_process_generates_takes_weights_and_says_when_it_is_gone() -> None:
    engine = make_process()
    try:
        requests = [Request([1, 2], seed, 0.5) for seed in (8, 9)]
        first, second = engine.generate(requests)
        assert (first.token_ids, second.token_ids) == ([1, 0, 2], [2, 0, 2])
        assert first.logprobs == [-0.5] * 3
        assert (first.finish, second.finish) == ("stop", "length")
        assert first.versions == (0, 0)
        (aborted,) = engine.generate([Request([1, 2], 7, 0.5)])
        assert (aborted.finish, aborted.error) == ("error", "the engine ended it: abort")
        engine.tell(("init", {"buffers": []}))
        expect(engine, "ready", 5.0)
        assert tell_update(engine, 4, "a", "b") == (4, None)
        (after,) = engine.generate(requests[:1])
        assert (after.token_ids, after.versions) == ([1, 2, 2], (4, 4))
        assert engine.generate([]) == []
        with pytest.raises(RuntimeError, match="ValueError: the prompt is too long"):
            engine.generate([requests[0], Request([99], 8, 0.5)])
        assert engine.generate(requests[:1]) == [after]
        os.kill(engine.child.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="its process ended with code -9"):
            engine.generate(requests)
        with pytest.raises(WeightSyncError, match="its process ended with code -9"):
            tell_update(engine, 5, "a")
    finally:
        engine.close()


@pytest.mark.usefixtures("python_path")
def test_weights_that_a_process_cannot_load_leave_it_refusing_to_generate() -> None:
    engine = make_process()
    try:
        engine.tell(("begin", 1, 5.0))
        engine.tell(("update", {"names": ["bad"]}))
        with pytest.raises(WeightSyncError, match="ValueError: no parameter called bad"):
            expect(engine, "taken", 5.0)
        engine.tell(("update", {"names": ["a"]}))  # were on their way
        engine.tell(("commit", False))
        with pytest.raises(RuntimeError, match="no complete weights"):
            engine.generate([Request([1, 2], 8, 0.5)])
    finally:
        engine.close()


@pytest.mark.usefixtures("python_path")
def test_weights_come_between_two_steps_of_running_requests() -> None:
    engine = make_process()
    try:
        many = [Request([1, 2], 8, 0.5)] * 200
        waits = [engine.submit(many) for _ in range(20)]
        assert tell_update(engine, 1, "a") == (1, None)
        versions = [completion.versions for wait in waits for completion in wait()]
        assert set(versions) <= {(0, 0), (0, 1), (1, 1)}
        assert len(versions) == 4000
    finally:
        engine.close()
    assert "engine-messages" not in {thread.name for thread in threading.enumerate()}


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
        start_vllm(python, {"model": model}, {}, device=None)


@pytest.mark.usefixtures("python_path")
def test_a_process_says_the_routes_of_prompt_and_completion() -> None:
    for options, expected in (({}, None), ({"enable_return_routed_experts": True}, [[[2], [2]]] * 4)):
        engine = make_process(**options)
        try:
            (completion,) = engine.generate([Request([1, 2], 8, 0.5)])
            assert (None if completion.routes is None else completion.routes.tolist()) == expected
        finally:
            engine.close()


class Server(BaseHTTPRequestHandler):
    mode = "processed_logprobs"
    routes: ClassVar[np.ndarray | None] = None
    paused = False
    told: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def do_GET(self) -> None:
        if self.path == "/is_paused":
            self._answer({"is_paused": self.paused})
        elif self.path.startswith("/get_world_size"):
            self._answer({"world_size": 2})
        elif self.path.startswith("/server_info"):
            model = {"logprobs_mode": self.mode, "enable_return_routed_experts": self.routes is not None}
            self._answer({"vllm_config": {"model_config": model}})
        else:
            self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.startswith("/v1"):
            Server.told.append((self.path, body))
            if body.get("update_info", {}).get("names") == ["bad"]:
                self.send_error(500)
            else:
                self._answer(None)
        elif body["prompt"] == [13]:
            self.send_error(500)
        else:
            assert body["model"] == "served"
            assert body["top_p"] == body["repetition_penalty"] == 1
            ids = [*body["prompt"], body["seed"]]
            logprobs = {"token_logprobs": [-body["temperature"]] * len(ids)}
            choice = {"finish_reason": "length", "token_ids": ids, "logprobs": logprobs}
            if self.routes is not None:
                file = io.BytesIO()
                np.save(file, self.routes)
                choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            self._answer({"choices": [choice]})

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
    engine = VllmServers([url, url + "/"], {"max_tokens": 3})
    good, bad = engine.generate([Request([5], 7, 0.5), Request([13], 7, 0.5)])
    assert good.token_ids == [5, 7]
    assert good.logprobs == [-0.5, -0.5]
    assert good.finish == "length"
    assert bad.finish == "error"
    assert "500" in bad.error
    with pytest.raises(RuntimeError, match="every request failed, the first with: .*500"):
        engine.generate([Request([13], 7, 0.5)])
    engine.close()


def test_servers_say_routes_or_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="router_replay needs: start it with .* --enable-return-routed-experts"):
        VllmServers([url], {}, routes=True)
    routes = np.arange(300, 306, dtype=np.uint16).reshape(1, 2, 3)
    monkeypatch.setattr(Server, "routes", routes)
    engine = VllmServers([url], {}, routes=True)
    (completion,) = engine.generate([Request([5], 7, 0.5)])
    assert completion.routes.dtype == np.uint16
    assert np.array_equal(completion.routes, routes)
    engine.close()


def test_all_servers_take_weights_in_one_session_while_requests_wait(url: str) -> None:
    engine = VllmServers([url, url], {})
    assert engine.num_workers == 4
    Server.told.clear()
    engine.tell(("init", {"rank_offset": 1, "world_size": 5}))
    expect(engine, "ready", 5.0)
    offsets = sorted(body["init_info"]["rank_offset"] for _, body in Server.told)
    assert offsets == [1, 3]
    Server.told.clear()
    assert tell_update(engine, 3, "a") == (3, None)
    assert [path for path, _ in Server.told[::2]] == [
        "/pause?mode=keep",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    assert len(Server.told) == 10
    (after,) = engine.generate([Request([5], 7, 0.5)])
    assert after.versions == (3, 3)
    other = VllmServers([url], {}, leads=False)
    assert other.num_workers == 0
    Server.told.clear()
    assert tell_update(other, 3, "a") == (3, None)
    assert other.generate([Request([5], 7, 0.5)])[0].versions == (3, 3)
    assert Server.told == []
    with pytest.raises(WeightSyncError, match="500"):
        tell_update(engine, 4, "bad")
    with pytest.raises(WeightSyncError, match="start the servers anew"):
        engine.generate([Request([5], 7, 0.5)])
    engine.close()


def test_servers_that_are_not_there_or_report_raw_logprobs_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="http://127.0.0.1:9 does not answer"):
        VllmServers(["http://127.0.0.1:9"], {})
    monkeypatch.setattr(Server, "paused", True)
    with pytest.raises(InputError, match="is paused, as after an update of its weights that failed: start it anew"):
        VllmServers([url], {})
    monkeypatch.setattr(Server, "paused", False)
    monkeypatch.setattr(Server, "mode", "raw_logprobs")
    with pytest.raises(InputError, match="reports raw log-probabilities, .* start it with VLLM_SERVER_DEV_MODE=1"):
        VllmServers([url], {})
