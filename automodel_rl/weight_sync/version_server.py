"""Gives the versions in a folder over HTTP to those that know a secret of the run, and that do not share the folder."""

import contextlib
import hmac
import http.server
import os
import re
import secrets
import socket
import threading
import urllib.parse
from collections import OrderedDict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from automodel_rl.launch.door import HANDSHAKE_SECONDS, Unproven, listen
from automodel_rl.origins import why_foreign
from automodel_rl.weight_sync.version_files import NEWEST_FILE, VERSION_FILE

INNER = re.compile(rf"/({re.escape(NEWEST_FILE)}|\d{{8}}/(?:{re.escape(VERSION_FILE)}|sender_\d+\.bin))", re.ASCII)
"""Paths of what is given. The folder has more: the run's address with its key, and what is being written."""

SILENCE = 60.0
"""Longest wait in seconds for a client's next bytes, or until it takes more."""


MAX_NONCES = 2**17
"""Requests that are remembered, so that none is answered twice."""

SCHEME = "automodel_rl"

NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)


class RequestSigner:
    """Signs requests for one path each, so that the secret itself is never sent, not even to a false server.

    Args:
        key: the run's key.
        salt: what the run has told of this server; each server has another secret.
    """

    def __init__(self, key: bytes, salt: str):
        self._secret = hmac.digest(key, b"automodel_rl weights\0" + salt.encode(), "sha256")

    def headers(self, url: str) -> dict[str, str]:
        """The headers of one request of a URL."""
        nonce = secrets.token_hex(16)
        return {"Authorization": f"{SCHEME} {nonce} {self._proof(urllib.parse.urlsplit(url).path, nonce)}"}

    def nonce_of(self, path: str, authorization: str) -> str | None:
        """The nonce of a request that was signed for this path; None if it was not."""
        scheme, _, rest = authorization.partition(" ")
        nonce, _, proof = rest.partition(" ")
        if scheme != SCHEME or not NONCE.fullmatch(nonce):
            return None
        return nonce if hmac.compare_digest(proof.encode(), self._proof(path, nonce).encode()) else None

    def _proof(self, path: str, nonce: str) -> str:
        return hmac.digest(self._secret, f"{nonce} {path}".encode(), "sha256").hex()


class VersionServer:
    """Gives published versions over HTTP, in threads, until it is closed. The stream is not encrypted.

    Args:
        folder: the folder of versions.
        host: the name of this machine for those who read, as of `listen`.
        port: the port; 0 for any.
        key: the run's key.

    Attributes:
        port: the port that it listens on.
        salt: what readers need to sign requests, besides the key.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, folder: Path, host: str, port: int, key: bytes):
        self.salt = secrets.token_hex(16)
        self._server = _Server(listen(host, port), host, folder, RequestSigner(key, self.salt))
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="versions").start()

    def close(self) -> None:
        """Takes no more requests. What is on its way may still arrive."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """A server over a socket that listens already."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, host: str, folder: Path, signer: RequestSigner):
        super().__init__(("", 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, listening.getsockname()
        self.host, self.folder, self.signer, self.unproven = host, folder, signer, Unproven()
        self._nonces: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def is_signed(self, path: str, authorization: str) -> bool:
        """Whether a request was signed for this path, and has not been answered yet."""
        nonce = self.signer.nonce_of(path, authorization)
        with self._lock:
            if nonce is None or nonce in self._nonces:
                return False
            self._nonces[nonce] = None
            if len(self._nonces) > MAX_NONCES:
                self._nonces.popitem(last=False)
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever does not get what it has asked for asks again."""


class _Request(http.server.BaseHTTPRequestHandler):
    timeout = SILENCE
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            self._until_signed = contextlib.ExitStack()
            with self._until_signed:
                self._until_signed.enter_context(self.server.unproven.counted(self.connection, self.client_address[0]))
                late = threading.Timer(HANDSHAKE_SECONDS, self._hang_up)
                late.daemon = True
                self._until_signed.callback(late.cancel)
                late.start()
                super().handle()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        why = why_foreign(self.server.host, self.headers.get("Host", ""), self.headers.get("Origin"))
        if why:
            self._refuse(HTTPStatus.FORBIDDEN, f"{why}\n".encode())
            return
        if not self.server.is_signed(self.path, self.headers.get("Authorization", "")):
            self._refuse(HTTPStatus.UNAUTHORIZED, b"only generators of the run may read its weights\n")
            return
        self._until_signed.close()
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

    def _begin(self, status: HTTPStatus, num_bytes: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def _refuse(self, status: HTTPStatus, content: bytes) -> None:
        self._begin(status, len(content))
        self.wfile.write(content)
