"""HTTP server in a thread with its own event loop."""

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from automodel_rl.chat_api.values import check_depth
from automodel_rl.errors import InputError
from automodel_rl.origins import SameOriginMiddleware

MAX_BYTES = 2**25
KEEP_ALIVE_SECONDS = 600
"""Time until an idle connection is closed. Clients reconnect."""


class HttpThread:
    """A server on a free port.

    Args:
        what: the setting of `host`, for errors.

    Attributes:
        loop: its event loop.
        url: without a path.

    Raises:
        InputError: it cannot listen there.
    """

    def __init__(self, host: str, routes: Sequence[Route], what: str):
        self.loop = asyncio.new_event_loop()
        try:
            self._listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise InputError(f"{what}={host}: cannot listen there ({error.strerror})") from None
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            SameOriginMiddleware(Starlette(routes=list(routes)), host),
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True, name="endpoint")
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._server.serve(sockets=[self._listener]))
            for task in asyncio.all_tasks(self.loop):  # requests of clients that are gone
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
        finally:
            self.loop.close()


async def body_of(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BYTES:
            raise InputError(f"the request is larger than {MAX_BYTES} bytes: send less")
    return bytes(data)


def parsed(raw: bytes) -> dict[str, Any]:
    """Parses a body. Raises InputError if it is no JSON object, or nested too deep."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON ({error})") from None
    check_depth(body, "the request")
    if not isinstance(body, dict):
        raise InputError(f"the request is {body!r:.80}: send an object")
    return body


def refusal(status: int, text: str, code: str) -> Response:
    """Returns an error that both OpenAI's and Anthropic's clients understand, and do not retry."""
    error = {"message": text, "type": "invalid_request_error", "code": code, "param": None}
    return JSONResponse({"type": "error", "error": error}, status, {"x-should-retry": "false"})


def described(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "local"}
