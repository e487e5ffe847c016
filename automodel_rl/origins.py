"""Protects this package's local servers from pages of other sites in a browser.

Such a page can send requests to any address the browser reaches, and can read the answers if its own host name
resolves to that address (DNS rebinding). It cannot choose the Host and Origin headers. Programs send no Origin.
"""

import ipaddress
import json
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Loopback host names."""


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable only from this machine."""
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def foreign_page_error(bound: str, host: str, origin: str | None) -> str:
    """Returns why a request may come from a page of another site; empty if it does not.

    Args:
        bound: address on which the server listens. On non-loopback addresses any Host is accepted, as the server
            cannot know its names, such as those of proxies.
        host: the Host header.
        origin: the Origin header, if present.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if is_loopback(bound) and name not in (*LOOPBACK, bound):
        return f"the header Host is {host!r:.80}, but this server is 127.0.0.1 or localhost: use that address"
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"the header Origin is {origin!r:.80}: pages of other sites are not allowed"
    return ""


class SameOriginMiddleware:
    """ASGI middleware that answers 403 to requests of other sites' pages. `bound` is the address on which the server
    listens."""

    def __init__(self, app: Any, bound: str):
        self.app, self.bound = app, bound

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers") or ()}
        why = scope["type"] == "http" and foreign_page_error(
            self.bound, headers.get(b"host", ""), headers.get(b"origin")
        )
        if not why:
            await self.app(scope, receive, send)
            return
        content = json.dumps({"detail": why, "error": {"message": why}}).encode()
        response_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": response_headers})
        await send({"type": "http.response.body", "body": content})
