"""HTTP requests to a vLLM server: with its token, without redirects, and with limits on an answer's size and time."""

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

TOKEN_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the servers' token, which vLLM reads as well."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

ANSWER_SECONDS = 3600.0
PROBE_SECONDS = 15.0
"""Timeout of a request to a server that may be gone."""

ANSWER_BYTES = 2**30


class VllmServer:
    """A server started with `vllm serve`. Servers with the same URL are equal."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VllmServer) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def is_exposed(self) -> bool:
        """Whether the server is on another machine, and this process has no token for it."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        return host not in LOOPBACK and TOKEN_VARIABLE not in os.environ

    def get(self, path: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Returns the JSON at a path with query.

        Raises:
            HTTPError: the server answers with an error.
            OSError: it does not answer.
            ValueError: the answer is not JSON, or too long.
        """
        return self._answer(urllib.request.Request(self.url + path, headers=_authorization()), seconds)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Posts JSON, and returns the answer; None if it is empty. Raises as `get` does."""
        headers = {"Content-Type": "application/json", **_authorization()}
        return self._answer(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers), ANSWER_SECONDS)

    def _answer(self, request: urllib.request.Request, seconds: float) -> Any:
        with _OPENER.open(request, timeout=seconds) as response:
            text = response.read(ANSWER_BYTES + 1)
        if len(text) > ANSWER_BYTES:
            raise ValueError(f"the answer is longer than {ANSWER_BYTES} bytes")
        return json.loads(text) if text else None


def run_concurrently(work: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Calls a function with each set of arguments concurrently. Raises the first error."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects, so that a server cannot send the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _authorization() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    return {} if token is None else {"Authorization": f"Bearer {token}"}
