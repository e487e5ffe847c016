"""Gives the versions in a folder over HTTP to those that the run has told a token, and that do not share the folder."""

import contextlib
import hmac
import http.server
import os
import re
import secrets
import socket
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

from automodel_rl.launch.door import MOST_STRANGERS, listen
from automodel_rl.origins import why_foreign
from automodel_rl.weight_sync.version_files import NEWEST_FILE, VERSION_FILE

INNER = re.compile(rf"/({re.escape(NEWEST_FILE)}|\d{{8}}/(?:{re.escape(VERSION_FILE)}|sender_\d+\.bin))", re.ASCII)
"""Paths of what is given. The folder has more: the run's address with its key, and what is being written."""

SILENCE = 60.0
"""Longest wait in seconds for a client's next bytes, or until it takes more."""


def headers_of(token: str) -> dict[str, str]:
    """The headers of requests of one whom the run has told its token."""
    return {"Authorization": f"Bearer {token}"}


class VersionServer:
    """Gives published versions over HTTP, in threads, until it is closed. The stream is not encrypted.

    Args:
        folder: the folder of versions.
        host: the name of this machine for those who read, as of `listen`.
        port: the port; 0 for any.

    Attributes:
        port: the port that it listens on.
        token: what readers must know. It is another one for each server.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, folder: Path, host: str, port: int):
        self.token = secrets.token_hex(32)
        self._server = _Server(listen(host, port), host, folder, headers_of(self.token)["Authorization"])
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="versions").start()

    def close(self) -> None:
        """Takes no more requests. What is on its way may still arrive."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """A server over a socket that listens already. Strangers get no more threads than `MOST_STRANGERS`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, host: str, folder: Path, expected: str):
        super().__init__(("", 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, listening.getsockname()
        self.host, self.folder, self.expected = host, folder, expected
        self.strangers = threading.Semaphore(MOST_STRANGERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.strangers.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever does not get what it has asked for asks again."""


class _Request(http.server.BaseHTTPRequestHandler):
    timeout = SILENCE
    server: _Server
    _is_stranger = True

    def handle(self) -> None:
        try:
            with contextlib.suppress(OSError):  # the reader is gone
                super().handle()
        finally:
            self._admit()

    def do_GET(self) -> None:
        why = why_foreign(self.server.host, self.headers.get("Host", ""), self.headers.get("Origin"))
        if why:
            self._refuse(HTTPStatus.FORBIDDEN, f"{why}\n".encode())
            return
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self.server.expected.encode()):
            self._refuse(HTTPStatus.UNAUTHORIZED, b"the run tells its generators a token\n")
            return
        self._admit()
        found = INNER.fullmatch(self.path)
        try:
            file = None if found is None else (self.server.folder / found[1]).open("rb")
        except OSError:
            file = None
        if file is None:
            self._refuse(HTTPStatus.NOT_FOUND, b"not there\n")
            return
        with file:
            self._begin(HTTPStatus.OK, os.fstat(file.fileno()).st_size)
            self.connection.sendfile(file)

    def log_message(self, *_: object) -> None: ...

    def _admit(self) -> None:
        """Notes that this is no stranger, or that it is gone."""
        if self._is_stranger:
            self._is_stranger = False
            self.server.strangers.release()

    def _begin(self, status: HTTPStatus, num_bytes: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def _refuse(self, status: HTTPStatus, content: bytes) -> None:
        self._begin(status, len(content))
        self.wfile.write(content)
