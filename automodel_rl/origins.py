"""Keeps pages of other sites, in a browser on this machine, from the servers of this package.

Such a page can send requests to any address that the browser reaches, and reads the answers if its own name leads to
that address (DNS rebinding). What it cannot choose are the headers Host and Origin. Programs send no Origin.
"""

import ipaddress
import json
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def why_foreign(bound: str, host: str, origin: str | None) -> str:
    """Why a request may be one of a page of another site, in a line; empty if it is none.

    Args:
        bound: the address on which the server listens. Others than loopback have names that the server does not know,
            also those of proxies, so that any Host is served there.
        host: the header Host.
        origin: the header Origin, if there is one.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if is_loopback(bound) and name not in (*LOOPBACK, bound):
        return f"the header Host is {host!r:.80}, and this server is 127.0.0.1 or localhost: use that address"
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return f"the header Origin is {origin!r:.80}: pages of other sites are not served"
    return ""


class OwnPagesOnly:
    """An ASGI application that answers 403 where `why_foreign` says so, and lets another one answer the rest.

    Args:
        app: the other one.
        bound: the address on which the server listens.
    """

    def __init__(self, app: Any, bound: str):
        self.app, self.bound = app, bound

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers") or ()}
        why = scope["type"] == "http" and why_foreign(self.bound, headers.get(b"host", ""), headers.get(b"origin"))
        if not why:
            await self.app(scope, receive, send)
            return
        content = json.dumps({"detail": why, "error": {"message": why}}).encode()
        told = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": told})
        await send({"type": "http.response.body", "body": content})
