"""Servers of vLLM over HTTP: what they are asked, what they are told of weights, and which ones are refused."""

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.generator_messages import Committed, Request, Sampling
from automodel_rl.generators.protocol import results
from automodel_rl.generators.vllm_checks import connect_servers
from automodel_rl.generators.vllm_http import VllmServer
from automodel_rl.generators.vllm_servers import VllmServers
from automodel_rl.weight_sync.channel import call
from tests.weights import send_weights


def connect(
    urls: Sequence[str], is_leader: bool = True, routes: bool = False, ends: tuple[int, ...] = (2,)
) -> VllmServers:
    return VllmServers(urls, connect_servers(urls, routes), ends, is_leader)


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
            assert (body["top_p"], body["top_k"], body["repetition_penalty"]) in ((1, 0, 1), (0.5, 3, 1))
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


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", port), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture
def second() -> Iterator[str]:
    with serving() as address:
        yield address


def test_servers_answer_requests_one_by_one(url: str) -> None:
    generator = connect([url, url + "/"])
    good, bad = results(
        generator.submit([Request([5], 7, Sampling(3, 0.5, 0.5, 3)), Request([13], 7, Sampling(3, 0.5))])
    )
    assert good.token_ids == [5, 7]
    assert good.logprobs == [-0.5, -0.5]
    assert good.finish == "length"
    assert bad.finish == "error"
    assert "500" in bad.error
    (alone,) = results(generator.submit([Request([13], 7, Sampling(3, 0.5))]))
    assert alone.error == bad.error  # a server that refuses a request is there
    generator.close()


def test_a_generator_without_a_server_that_answers_is_lost() -> None:
    with serving() as only:
        generator = connect([only])
    with pytest.raises(ConnectionError, match="refused"):
        results(generator.submit([Request([5], 7, Sampling(3, 0.5))]))
    generator.close()


def test_servers_say_routes_or_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="router_replay needs: start it with .* --enable-return-routed-experts"):
        connect([url], routes=True)
    routes = np.arange(300, 306, dtype=np.uint16).reshape(1, 2, 3)
    monkeypatch.setattr(Server, "routes", routes)
    generator = connect([url], routes=True)
    (completion,) = results(generator.submit([Request([5], 7, Sampling(3, 0.5))]))
    assert completion.routes.dtype == np.uint16
    assert np.array_equal(completion.routes, routes)
    generator.close()


def test_all_servers_take_weights_in_one_session_while_requests_wait(url: str, second: str) -> None:
    generator = connect([url, second])
    assert generator.weights.num_workers == 4
    Server.told.clear()
    call(generator.weights, "init_transfer", {"rank_offset": 1, "world_size": 5}, seconds=5.0)
    offsets = sorted(body["init_info"]["rank_offset"] for _, body in Server.told)
    assert offsets == [1, 3]
    Server.told.clear()
    assert send_weights(generator.weights, 3, "a") == Committed(3)
    assert [path for path, _ in Server.told[::2]] == [
        "/pause?mode=keep",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    assert len(Server.told) == 10
    (after,) = results(generator.submit([Request([5], 7, Sampling(3, 0.5))]))
    assert after.versions == (3, 3)
    other = connect([url], is_leader=False)
    assert other.weights.num_workers == 0
    Server.told.clear()
    assert send_weights(other.weights, 3, "a") == Committed(3)
    assert results(other.submit([Request([5], 7, Sampling(3, 0.5))]))[0].versions == (3, 3)
    assert Server.told == []
    with pytest.raises(WeightSyncError, match="500"):
        send_weights(generator.weights, 4, "bad")
    with pytest.raises(WeightSyncError, match="restart the servers"):
        results(generator.submit([Request([5], 7, Sampling(3, 0.5))]))
    generator.close()


def init(generator: VllmServers, servers: list[str]) -> None:
    """The beginning of a connection, as the transport does it."""
    call(generator.weights, "init_transfer", {"rank_offset": 1, "world_size": 5, "servers": servers}, seconds=5.0)


def test_the_others_write_for_a_server_that_is_gone_until_it_has_weights_again(url: str) -> None:
    requests = [Request([5], seed, Sampling(3, 0.5)) for seed in range(4)]
    with serving() as second:
        generator, other = connect([url, second]), connect([url, second], is_leader=False)
        assert not generator.have_changed
    # The second one is gone now.
    for one in (generator, other):
        assert [completion.token_ids for completion in results(one.submit(requests))] == [
            [5, seed] for seed in range(4)
        ]
    assert generator.have_changed
    assert not other.have_changed  # it is not asked
    with pytest.raises(InputError, match=f"{second} does not answer"):
        connect([url, second])
    later = connect_servers([url, second], routes=False, some_may_be_gone=True)
    assert len(later) == 2
    assert generator.weights.num_workers == 2
    assert generator.weights.addresses == [url]
    for one in (generator, other):
        init(one, [url])
        assert send_weights(one.weights, 1, "a") == Committed(1)
    assert not generator.have_changed
    with serving(int(second.rpartition(":")[2])):  # it is there again, with the weights that it began with
        assert generator.have_changed
        for one in (generator, other):
            assert one.weights.members == one.servers[:1]
        assert generator.weights.num_workers == 4
        for one in (generator, other):
            init(one, generator.weights.addresses)
            assert send_weights(one.weights, 2, "a") == Committed(2)
            assert one.weights.members == one.servers
        assert not generator.have_changed
    with pytest.raises(InputError, match=f"{second} does not answer"):
        connect_servers([second], routes=False, some_may_be_gone=True)
    generator.close()
    other.close()


def test_servers_join_and_leave_by_a_file(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "servers.txt"
    urls = [f"file:{file}"]
    with pytest.raises(InputError, match=r"servers.txt cannot be read"):
        connect(urls)
    file.write_text("# none yet\n")
    with pytest.raises(InputError, match=r"servers.txt contains no server: write one URL per line"):
        connect(urls)
    file.write_text(f"{url}/\n")
    generator = connect(urls)
    init(generator, [url])
    assert send_weights(generator.weights, 1, "a") == Committed(1)
    assert not generator.have_changed
    with serving() as second:
        file.write_text(f"{url}\n\n  {second}  \n")
        assert generator.have_changed
        assert generator.weights.addresses == [url]  # until the next weight sync
        assert generator.weights.num_workers == 4
        init(generator, generator.weights.addresses)
        assert send_weights(generator.weights, 2, "a") == Committed(2)
        assert generator.weights.addresses == [url, second]
        assert not generator.have_changed
        file.write_text(second)
        assert generator.have_changed
        assert generator.weights.num_workers == 2
        init(generator, generator.weights.addresses)
        assert send_weights(generator.weights, 3, "a") == Committed(3)
        Server.told.clear()
        (completion,) = results(generator.submit([Request([5], 7, Sampling(3, 0.5))]))
        assert completion.versions == (3, 3)
        file.write_text("")
        assert not generator.have_changed  # perhaps it is being written
        assert "contains no server: write one URL per line; keeping the previous servers" in capsys.readouterr().err
        assert generator.weights.servers == [VllmServer(second)]
    generator.close()


def test_servers_that_are_not_there_or_report_raw_logprobs_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="http://127.0.0.1:9 does not answer"):
        connect(["http://127.0.0.1:9"])
    monkeypatch.setattr(Server, "paused", True)
    with pytest.raises(InputError, match="is paused, as after a failed weight sync: restart it"):
        connect([url])
    monkeypatch.setattr(Server, "paused", False)
    monkeypatch.setattr(Server, "mode", "raw_logprobs")
    with pytest.raises(InputError, match="reports raw log-probabilities, .* start it with VLLM_SERVER_DEV_MODE=1"):
        connect([url])
