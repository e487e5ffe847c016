"""Connections to a process from those that know a key: ranks and generators, on this machine or on others."""

import contextlib
import ipaddress
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError

from automodel_rl.launch.authenticated import AuthenticatedConnection, prove_as_client, prove_as_server

LOCAL = ("localhost", "127.0.0.1")
"""Names of this machine for itself: all who come are on it."""

LONGEST_WAIT = 60.0
"""Longest wait in seconds for a process to accept a connection, and to prove that it knows the key."""

HANDSHAKE_SECONDS = 10.0
"""Longest time that a client may take for the whole handshake."""

MOST_HANDSHAKES = 5
"""Most times that a client tries one."""

MAX_UNPROVEN = 256
"""Most connections whose client has not proved yet that it knows the key."""

MAX_UNPROVEN_BY_ADDRESS = 128
"""The same of clients at one address. An IPv6 network of 64 bits counts as one."""

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

    def knock(self) -> AuthenticatedConnection:
        """A connection to the program, whose first message is due from here. A handshake that the program breaks off,
        to make room for others, is tried again.

        Raises:
            AuthenticationError: what listens there does not know the key.
            OSError, EOFError: the program cannot be reached.
        """
        deadline = time.monotonic() + LONGEST_WAIT
        for number in range(MOST_HANDSHAKES - 1):
            with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
                return self._connect(deadline)
            time.sleep(random.uniform(0, PAUSE * 2**number))  # others that were evicted try again, too
        return self._connect(deadline)

    def _connect(self, deadline: float) -> AuthenticatedConnection:
        end = socket.create_connection((self.host, self.port), LONGEST_WAIT)
        try:
            _keep_alive(end)
            return prove_as_client(end, self.key, deadline)
        except BaseException:
            end.close()
            raise


class Unproven:
    """Bounds the connections whose client has not proved yet that it knows a key.

    A new connection is always taken: where the bound is reached, the oldest one of the address with the most is closed.
    Handshakes take milliseconds, so clients that are slow on purpose keep nobody else out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, list[socket.socket]] = {}

    @contextlib.contextmanager
    def counted(self, end: socket.socket, address: str) -> Iterator[None]:
        """Counts a connection in this block, in which it may be shut down to make room for others."""
        with self._lock:
            self._make_room(_network_of(address))
            self._pending.setdefault(_network_of(address), []).append(end)
        try:
            yield
        finally:
            with self._lock:
                of_network = self._pending[_network_of(address)]
                of_network.remove(end)
                if not of_network:
                    del self._pending[_network_of(address)]

    def _make_room(self, network: str) -> None:
        """Shuts the oldest connection of a network down, or of another one, if there are too many."""
        if len(self._pending.get(network, [])) < MAX_UNPROVEN_BY_ADDRESS:
            if sum(len(ends) for ends in self._pending.values()) < MAX_UNPROVEN:
                return
            network = max(self._pending, key=lambda one: len(self._pending[one]))
        ends = self._pending[network]
        ends.append(ends.pop(0))  # so that another call takes the next one
        with contextlib.suppress(OSError):  # it is closed already
            ends[-1].shutdown(socket.SHUT_RDWR)


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

    def __init__(self, host: str, port: int, key: bytes, greet: Callable[[AuthenticatedConnection], None]):
        self._server = listen(host, port)
        self._server.settimeout(0.2)
        self.address = DoorAddress(host, self._server.getsockname()[1], key)
        self._greet, self._is_open, self._unproven = greet, True, Unproven()
        threading.Thread(target=self._take, daemon=True, name="door").start()

    def close(self) -> None:
        """Takes no more connections."""
        self._is_open = False

    def _take(self) -> None:
        with self._server:
            while self._is_open:
                try:
                    end, (address, *_) = self._server.accept()
                except TimeoutError:
                    continue
                except OSError:  # it is gone already, or this process has too many files open for now
                    time.sleep(PAUSE)
                    continue
                try:  # in a thread of its own, for a client may come and say nothing
                    threading.Thread(target=self._admit, args=(end, address), daemon=True).start()
                except RuntimeError:  # this process has too many threads for now
                    end.close()
                    time.sleep(PAUSE)

    def _admit(self, end: socket.socket, address: str) -> None:
        try:
            with self._unproven.counted(end, address):
                _keep_alive(end)
                connection = prove_as_server(end, self.address.key, time.monotonic() + HANDSHAKE_SECONDS)
        except (AuthenticationError, EOFError, OSError):
            end.close()
            return
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


def _network_of(address: str) -> str:
    """What counts as one address: that of IPv4, or the network of IPv6 whose addresses one machine may choose from."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        return str(known.ipv4_mapped or ipaddress.ip_network((known, 64), strict=False))
    return str(known)


def _keep_alive(end: socket.socket) -> None:
    """Lets a socket notice in time if the other machine is gone."""
    end.setblocking(True)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a frame is sent in three parts
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        end.setsockopt(socket.IPPROTO_TCP, option, seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)  # milliseconds; for what was sent
