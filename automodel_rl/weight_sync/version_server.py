"""HTTP server of published versions, for readers that know the run's key but do not share its folder."""

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

from automodel_rl.launch.listener import HANDSHAKE_SECONDS, PendingHandshakes, listen
from automodel_rl.origins import foreign_page_error
from automodel_rl.weight_sync.version_files import NEWEST_FILE, VERSION_FILE

INNER = re.compile(rf"/({re.escape(NEWEST_FILE)}|\d{{8}}/(?:{re.escape(VERSION_FILE)}|sender_\d+\.bin))", re.ASCII)
"""Served paths. The folder also has the run's join address with its key, and unfinished versions."""

SILENCE = 60.0
"""Seconds without progress after which a client's connection is closed."""


MAX_NONCES = 2**17
"""Nonces remembered to reject replayed requests."""

SCHEME = "automodel_rl"

NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)


class RequestSigner:
    """Signs each request for one path, so that the secret itself is never sent, not even to an impostor's server.

    Args:
        key: the run's key.
        salt: of this server, so that each has its own secret.
    """

    def __init__(self, key: bytes, salt: str):
        self._secret = hmac.digest(key, b"automodel_rl weights\0" + salt.encode(), "sha256")

    def headers(self, url: str) -> dict[str, str]:
        nonce = secrets.token_hex(16)
        return {"Authorization": f"{SCHEME} {nonce} {self._proof(urllib.parse.urlsplit(url).path, nonce)}"}

    def nonce_of(self, path: str, authorization: str) -> str | None:
        """Returns the nonce of a request signed for this path, else None."""
        scheme, _, rest = authorization.partition(" ")
        nonce, _, proof = rest.partition(" ")
        if scheme != SCHEME or not NONCE.fullmatch(nonce):
            return None
        return nonce if hmac.compare_digest(proof.encode(), self._proof(path, nonce).encode()) else None

    def _proof(self, path: str, nonce: str) -> str:
        return hmac.digest(self._secret, f"{nonce} {path}".encode(), "sha256").hex()


class VersionServer:
    """Serves published versions over unencrypted HTTP, in threads, until it is closed.

    Args:
        host: name of this machine for readers, see `listen`.
        port: 0 for any free port.

    Attributes:
        salt: needed, besides the key, to sign requests.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, folder: Path, host: str, port: int, key: bytes):
        self.salt = secrets.token_hex(16)
        self._server = _Server(listen(host, port), host, folder, RequestSigner(key, self.salt))
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="versions").start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """Server on a listening socket."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, host: str, folder: Path, signer: RequestSigner):
        super().__init__(("", 0), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, listening.getsockname()
        self.host, self.folder, self.signer, self.pending_handshakes = host, folder, signer, PendingHandshakes()
        self._nonces: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def is_signed(self, path: str, authorization: str) -> bool:
        """Returns whether a request was signed for this path, and is not a replay."""
        nonce = self.signer.nonce_of(path, authorization)
        with self._lock:
            if nonce is None or nonce in self._nonces:
                return False
            self._nonces[nonce] = None
            if len(self._nonces) > MAX_NONCES:
                self._nonces.popitem(last=False)
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: clients retry."""


class _Request(http.server.BaseHTTPRequestHandler):
    timeout = SILENCE
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            self._until_signed = contextlib.ExitStack()
            with self._until_signed:
                self._until_signed.enter_context(
                    self.server.pending_handshakes.counted(self.connection, self.client_address[0])
                )
                late = threading.Timer(HANDSHAKE_SECONDS, self._shutdown)
                late.daemon = True
                self._until_signed.callback(late.cancel)
                late.start()
                super().handle()

    def _shutdown(self) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        why = foreign_page_error(self.server.host, self.headers.get("Host", ""), self.headers.get("Origin"))
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
