"""Connections to a process from those that know a key: ranks and generators, on this machine or on others."""

import contextlib
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

LOCAL = ("localhost", "127.0.0.1")
"""Names of this machine for itself: all who come are on it."""

LONGEST_WAIT = 60.0
"""Longest wait in seconds for the other end to show that it knows the key."""

MOST_STRANGERS = 256
"""Most connections whose other end has not shown yet that it knows the key. Others are not taken."""

BACKLOG = 256
"""Most connections that wait to be taken: many may come at once after a weight sync."""

PAUSE = 0.2
"""Seconds until connections are taken again after an error."""


@dataclass(frozen=True)
class DoorAddress:
    """The address at which a process waits for others that know a key.

    Attributes:
        host, port: its address.
        key: what both ends must know.
    """

    host: str
    port: int
    key: bytes

    def knock(self) -> Connection:
        """A connection to the program, whose first message is due from here.

        Raises:
            AuthenticationError, OSError, EOFError: the program cannot be reached, or has another key.
        """
        with socket.create_connection((self.host, self.port), LONGEST_WAIT) as end:
            connection = _kept_alive(end)
        try:
            with _answered_in_time(connection):
                answer_challenge(connection, self.key)
                deliver_challenge(connection, self.key)
        except BaseException:
            connection.close()
            raise
        return connection


class Door:
    """Takes connections of those that know a key, in threads, until it is closed.

    Args:
        host: the name of this machine for those who come; with one of `LOCAL` nobody comes from other machines.
        port: the port to listen on; 0 for any.
        key: what both ends must know.
        greet: gets each connection, in a thread of its own, once the other end has shown that it knows the key.

    Attributes:
        address: what the other end needs to come.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, host: str, port: int, key: bytes, greet: Callable[[Connection], None]):
        self._server = listen(host, port)
        self._server.settimeout(0.2)
        self.address = DoorAddress(host, self._server.getsockname()[1], key)
        self._greet, self._is_open = greet, True
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        threading.Thread(target=self._take, daemon=True, name="door").start()

    def close(self) -> None:
        """Takes no more connections."""
        self._is_open = False

    def _take(self) -> None:
        with self._server:
            while self._is_open:
                try:
                    taken, _ = self._server.accept()
                except TimeoutError:
                    continue
                except OSError:  # it is gone already, or this process has too many files open for now
                    time.sleep(PAUSE)
                    continue
                connection = _kept_alive(taken)
                if self._strangers.acquire(blocking=False):
                    # In a thread of its own, for a stranger may come and say nothing.
                    threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _admit(self, connection: Connection) -> None:
        try:
            with _answered_in_time(connection):
                knows_key = _admits(connection, self.address.key)
        except OSError:  # it was closed
            return
        finally:
            self._strangers.release()
        if knows_key:
            self._greet(connection)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, for those who know this machine by a name, over IPv4 and IPv6.

    Args:
        host: the name, or an address. With one of this machine for itself, such as localhost, nobody comes from others.
        port: the port; 0 for any.

    Raises:
        OSError: the port is taken.
    """
    own = _loopback_address(host)
    if own is not None:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)


def _loopback_address(host: str) -> str | None:
    """The address by which this machine knows itself as `host`; None if others know it so, too."""
    if host in LOCAL:
        return "127.0.0.1"
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return None
    return found[0] if found and all(ipaddress.ip_address(one).is_loopback for one in found) else None


def _kept_alive(end: socket.socket) -> Connection:
    """A connection over a socket, which notices in time if the other machine is gone. The socket is of no use then."""
    end.setblocking(True)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        end.setsockopt(socket.IPPROTO_TCP, option, seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)  # milliseconds; for what was sent
    return Connection(end.detach())


@contextlib.contextmanager
def _answered_in_time(connection: Connection) -> Iterator[None]:
    """Waits for the other end in this block raise OSError after `LONGEST_WAIT`."""
    _limit(connection, LONGEST_WAIT)
    yield
    if not connection.closed:
        _limit(connection, 0.0)


def _limit(connection: Connection, seconds: float) -> None:
    """The longest wait for the other end; 0 for any."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def hang_up(connection: Connection) -> None:
    """Ends a connection. Threads that wait at either end then have no more messages, and close it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _admits(connection: Connection, key: bytes) -> bool:
    """Whether the other end of a connection that was taken knows the key. If it does not, the connection is closed."""
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError, ValueError):
        connection.close()
        return False
    return True
