"""Requests that a page of another site makes a browser send, to every server of the package."""

import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from automodel_rl.launch.background import in_thread
from automodel_rl.origins import foreign_page_error
from automodel_rl.report.server import RunServer
from automodel_rl.rollout.http_thread import HttpThread
from automodel_rl.weight_sync.version_server import VersionServer


@pytest.mark.parametrize(
    ("bound", "host", "origin", "is_foreign"),
    [
        ("127.0.0.1", "127.0.0.1:80", None, False),
        ("127.0.0.1", "LOCALHOST:80", "http://LOCALHOST:80", False),
        ("::1", "[::1]:80", "http://[::1]:80", False),
        ("127.0.0.2", "127.0.0.2", None, False),
        ("127.0.0.1", "evil.example:80", None, True),
        ("127.0.0.1", "evil.example:80", "http://evil.example:80", True),
        ("127.0.0.1", "", None, True),
        ("127.0.0.1", "[", None, True),
        ("127.0.0.1", "127.0.0.1.evil.example", None, True),
        ("127.0.0.1", "127.0.0.1:80", "http://127.0.0.1:81", True),
        ("127.0.0.1", "127.0.0.1:80", "null", True),
        ("0.0.0.0", "any.example", None, False),
        ("0.0.0.0", "any.example", "https://any.example", False),
        ("0.0.0.0", "any.example", "https://evil.example", True),
    ],
)
def test_requests_of_other_sites_are_told_by_host_and_origin(
    bound: str, host: str, origin: str | None, is_foreign: bool
) -> None:
    assert bool(foreign_page_error(bound, host, origin)) == is_foreign


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[int]:
    with RunServer([folder], 0) as server:
        ended = in_thread(server.serve_forever, "watch")
        yield server.server_port
        server.shutdown()
        ended.result()


@contextlib.contextmanager
def endpoint(folder: Path) -> Iterator[int]:
    async def answer(_: object) -> PlainTextResponse:
        return PlainTextResponse("hello")

    server = HttpThread("127.0.0.1", [Route("/", answer, methods=["GET", "POST"])], "host")
    yield int(server.url.rpartition(":")[2])
    server.close()


@contextlib.contextmanager
def versions(folder: Path) -> Iterator[int]:
    server = VersionServer(folder, "127.0.0.1", 0, b"k" * 32)
    yield server.port
    server.close()


@pytest.mark.parametrize(
    ("opened", "usual"), [(watch, 200), (endpoint, 200), (versions, 401)], ids=["watch", "endpoint", "versions"]
)
def test_every_server_refuses_pages_of_other_sites(opened: object, usual: int, tmp_path: Path) -> None:
    with opened(tmp_path) as port:  # type: ignore[operator]
        own = f"127.0.0.1:{port}"
        for headers, status in (
            ({}, usual),
            ({"Origin": f"http://{own}"}, usual),
            ({"Host": f"evil.example:{port}"}, 403),
            ({"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}, 403),
            ({"Origin": "http://evil.example"}, 403),
        ):
            connection = http.client.HTTPConnection(own, timeout=30)
            connection.request("GET", "/", headers=headers)
            assert connection.getresponse().status == status
            connection.close()
