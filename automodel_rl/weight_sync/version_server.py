"""Gives the versions in a folder over HTTP to those that know the run's key, and do not share the folder."""

import hashlib
import hmac
import http.server
import os
import re
import threading
from http import HTTPStatus
from pathlib import Path

from automodel_rl.weight_sync.version_files import NEWEST_FILE, VERSION_FILE

INNER = re.compile(rf"/({re.escape(NEWEST_FILE)}|\d{{8}}/(?:{re.escape(VERSION_FILE)}|sender_\d+\.bin))", re.ASCII)
"""Paths of what is given. The folder has more: the run's address with its key, and what is being written."""

SILENCE = 60.0
"""Longest wait in seconds for a client's next bytes, or until it takes more."""


def headers_of(key: bytes) -> dict[str, str]:
    """The headers of requests of one who knows the run's key. They do not give the key away."""
    token = hmac.new(key, b"published weights", hashlib.sha256).hexdigest()
    return {"Authorization": f"Bearer {token}"}


class VersionServer:
    """Gives published versions over HTTP, in threads, until it is closed. The stream is not encrypted.

    Args:
        folder: the folder of versions.
        host: the address to listen on; "" for all of the machine's.
        port: the port; 0 for any.
        key: the run's key.

    Attributes:
        port: the port that it listens on.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, folder: Path, host: str, port: int, key: bytes):
        self._server = _Server((host, port), _Request)
        self._server.folder, self._server.expected = folder, headers_of(key)["Authorization"]
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="versions").start()

    def close(self) -> None:
        """Takes no more requests. What is on its way may still arrive."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    folder: Path
    expected: str


class _Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE
    server: _Server

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self.server.expected.encode()):
            self._answer(HTTPStatus.UNAUTHORIZED, b"show that you know the run's key\n")
        elif (found := INNER.fullmatch(self.path)) is not None:
            self._give(self.server.folder / found[1])
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not there\n")

    def log_message(self, *_: object) -> None: ...

    def _give(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:
            self._answer(HTTPStatus.NOT_FOUND, b"not there\n")
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            self.connection.sendfile(file)

    def _answer(self, status: HTTPStatus, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
