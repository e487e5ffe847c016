"""HTTP requests to a server of vLLM: with the token, never redirected, and answers of limited length and time."""

import json
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

TOKEN_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the token of the servers, which vLLM reads, too."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

ANSWER_SECONDS = 3600.0
"""Longest silence of a server."""

ANSWER_BYTES = 2**30
"""Longest answer of a server."""


class VllmServer:
    """One server that was started with `vllm serve`.

    Args:
        url: where it is.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    @property
    def is_exposed(self) -> bool:
        """Whether it is on another machine and this process has no token for it."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        return host not in LOOPBACK and TOKEN_VARIABLE not in os.environ

    def get(self, path: str) -> Any:
        """The JSON at a path.

        Raises:
            OSError: the server does not answer, or with an error.
            ValueError: the answer is no JSON, or too long.
        """
        return self._answer(urllib.request.Request(self.url + path, headers=_authorization()))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that a path answers to a body, None if it answers nothing. Raises as `get` does."""
        headers = {"Content-Type": "application/json", **_authorization()}
        return self._answer(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def _answer(self, request: urllib.request.Request) -> Any:
        with _OPENER.open(request, timeout=ANSWER_SECONDS) as response:
            text = response.read(ANSWER_BYTES + 1)
        if len(text) > ANSWER_BYTES:
            raise ValueError(f"the answer is longer than {ANSWER_BYTES} bytes")
        return json.loads(text) if text else None


def at_once(work: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    """Calls of a function with each set of arguments, all at the same time. Raises what the first one raised."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(work, *arguments))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A server may not send the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _authorization() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    return {} if token is None else {"Authorization": f"Bearer {token}"}
