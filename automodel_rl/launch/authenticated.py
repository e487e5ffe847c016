"""Mutually authenticated connections: both ends prove that they know a key, and every frame carries a MAC.

The client is the end that connects. A proof is an HMAC-SHA256 over the prover's role and both nonces, so a proof
made for the other role or for another connection is rejected:

    client -> server    MAGIC, the client's nonce
    server -> client    the server's nonce, the server's proof
    client -> server    the client's proof

Relaying the handshake reveals no connection key: each direction has its own, derived from the shared key and both
nonces. A frame is a length and its content, each followed by an HMAC that covers the frame's number in its
direction. A forged, altered, replayed or missing frame ends the connection before any of it is used. Nothing is
encrypted: anyone who can read the network can read the messages.
"""

import contextlib
import hmac
import os
import pickle
import select
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from typing import Any

MAGIC = b"automodel_rl/1\r\n"
NONCE_BYTES = MAC_BYTES = 32

MAX_FRAME_BYTES = 2**32
"""Largest frame. No memory is allocated for a length that has not been authenticated."""

PIECE_BYTES = 2**24

_LENGTH = struct.Struct(">Q")
ROLES = _CLIENT, _SERVER = b"client", b"server"


class AuthenticatedConnection:
    """One end of a connection after the handshake. Several threads may send, one may receive.

    Args:
        end: the socket; the connection closes it.
        sending, receiving: HMAC keys of the two directions.
    """

    def __init__(self, end: socket.socket, sending: bytes, receiving: bytes):
        end.settimeout(None)
        self._end, self._sending, self._receiving = end, sending, receiving
        self._num_sent = self._num_received = 0
        self._lock = threading.RLock()  # a signal handler may send while its thread does

    @property
    def closed(self) -> bool:
        return self._end.fileno() < 0

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, value: Any) -> None:
        self.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def recv(self) -> Any:
        """Receives and unpickles a value. Only for peers that are trusted to run code here. Raises as `recv_bytes`."""
        return pickle.loads(self.recv_bytes())

    def send_bytes(self, content: bytes) -> None:
        """Sends one frame. Raises OSError if the other end is gone, ValueError if the frame is too long."""
        if len(content) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(content):,} bytes is too long: the limit is {MAX_FRAME_BYTES:,}")
        with self._lock:
            number = _LENGTH.pack(self._num_sent)
            self._num_sent += 1
            length = _LENGTH.pack(len(content))
            self._end.sendall(length + _mac(self._sending, b"length" + number + length))
            self._end.sendall(content)
            self._end.sendall(_mac(self._sending, b"content" + number, content))

    def recv_bytes(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
        """Receives one frame of at most `max_bytes` bytes.

        Raises:
            EOFError, OSError: the other end is gone, or the frame fails authentication or is too long.
        """
        number = _LENGTH.pack(self._num_received)
        self._num_received += 1
        length = _received(self._end, _LENGTH.size)
        self._check(b"length" + number + length)
        (num_bytes,) = _LENGTH.unpack(length)
        if num_bytes > max_bytes:
            raise OSError(f"the other end sent a message of {num_bytes:,} bytes: the limit is {max_bytes:,}")
        content = _received(self._end, num_bytes)
        self._check(b"content" + number, content)
        return content

    def poll(self, seconds: float = 0.0) -> bool:
        """Waits at most `seconds`. Returns whether data has arrived or the other end is gone."""
        waiting = select.poll()  # select.select takes no descriptors above 1,023
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(1_000 * seconds))

    def shutdown(self) -> None:
        """Shuts the connection down. Threads blocked in a receive at either end get EOFError and close it."""
        with contextlib.suppress(OSError):  # it is closed, or the other end is gone
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()

    def __del__(self) -> None:
        self._end.close()

    def __enter__(self) -> "AuthenticatedConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, start: bytes, content: bytes = b"") -> None:
        if not hmac.compare_digest(_received(self._end, MAC_BYTES), _mac(self._receiving, start, content)):
            raise OSError("a message failed authentication")


def prove_as_client(end: socket.socket, key: bytes, deadline: float) -> AuthenticatedConnection:
    """Runs the client side of the handshake on a connected socket.

    Args:
        key: the secret that both ends must know.
        deadline: latest `time.monotonic()` at which the handshake may complete.

    Raises:
        AuthenticationError: the server does not know the key.
        EOFError, OSError: the server is gone or too slow.
    """
    nonce = os.urandom(NONCE_BYTES)
    end.settimeout(_seconds_until(deadline))
    end.sendall(MAGIC + nonce)
    answer = _received(end, NONCE_BYTES + MAC_BYTES, deadline)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(key, _SERVER, nonces)):
        raise AuthenticationError("the server does not know the key")
    end.sendall(_proof(key, _CLIENT, nonces))
    return AuthenticatedConnection(end, *_session_keys(key, nonces))


def prove_as_server(end: socket.socket, key: bytes, deadline: float) -> AuthenticatedConnection:
    """Runs the server side of the handshake. Arguments and errors as for `prove_as_client`."""
    hello = _received(end, len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise AuthenticationError("the client uses a different protocol")
    nonce = os.urandom(NONCE_BYTES)
    nonces = hello[len(MAGIC) :] + nonce
    end.settimeout(_seconds_until(deadline))
    end.sendall(nonce + _proof(key, _SERVER, nonces))
    if not hmac.compare_digest(_received(end, MAC_BYTES, deadline), _proof(key, _CLIENT, nonces)):
        raise AuthenticationError("the client does not know the key")
    of_client, of_server = _session_keys(key, nonces)
    return AuthenticatedConnection(end, of_server, of_client)


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return _mac(key, b"automodel_rl proof of the " + role + b"\0" + nonces)


def _session_keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Keys for frames from the client and from the server."""
    of_client, of_server = (_mac(key, b"automodel_rl frames of the " + role + b"\0" + nonces) for role in ROLES)
    return of_client, of_server


def _mac(key: bytes, start: bytes, content: bytes = b"") -> bytes:
    made = hmac.new(key, start, "sha256")
    made.update(content)
    return made.digest()


def _received(end: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """Reads exactly `num_bytes`. Memory grows only with the data received."""
    content = bytearray()
    while len(content) < num_bytes:
        if deadline is not None:
            end.settimeout(_seconds_until(deadline))
        piece = end.recv(min(num_bytes - len(content), PIECE_BYTES))
        if not piece:
            raise EOFError("the other end has disconnected")
        content += piece
    return bytes(content)


def _seconds_until(deadline: float) -> float:
    """Returns the seconds left. Raises TimeoutError after the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    return left
