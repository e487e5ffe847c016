"""Authenticated TCP listeners and clients, for ranks and generators on this machine or others."""

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
"""Host names for which only processes on this machine can connect."""

CONNECT_TIMEOUT = 60.0
"""Longest wait in seconds for a server to accept a connection and complete the handshake."""

HANDSHAKE_SECONDS = 10.0
"""Longest time a server gives a client for the whole handshake."""

MAX_HANDSHAKES = 5
"""Handshakes a client attempts before it gives up."""

MAX_PENDING_HANDSHAKES = 256
"""Most connections in the handshake at once."""

MAX_PENDING_HANDSHAKES_PER_ADDRESS = 128
"""Most connections in the handshake from one address. An IPv6 /64 network counts as one address."""

BACKLOG = 256
"""Listen backlog: many clients may connect at once after a weight sync."""

PAUSE = 0.2
"""Seconds before a listener accepts again after an error; also the unit of a client's backoff."""


@dataclass(frozen=True)
class ListenerAddress:
    """Address and key of a listener."""

    host: str
    port: int
    key: bytes

    def connect(self) -> AuthenticatedConnection:
        """Connects and completes the handshake; the client sends the first message. Retries when the server closes
        the connection during the handshake to make room for others.

        Raises:
            AuthenticationError: the server does not know the key.
            OSError, EOFError: the server cannot be reached.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT
        for number in range(MAX_HANDSHAKES - 1):
            with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
                return self._connect(deadline)
            time.sleep(random.uniform(0, PAUSE * 2**number))  # spreads out the retries of evicted clients
        return self._connect(deadline)

    def _connect(self, deadline: float) -> AuthenticatedConnection:
        end = socket.create_connection((self.host, self.port), CONNECT_TIMEOUT)
        try:
            _keep_alive(end)
            return prove_as_client(end, self.key, deadline)
        except BaseException:
            end.close()
            raise


class PendingHandshakes:
    """Limits the number of connections that have not completed the handshake.

    A new connection is always accepted: at the limit, the oldest connection of the address that has the most is
    closed. A handshake takes milliseconds, so deliberately slow clients lock nobody out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, list[socket.socket]] = {}

    @contextlib.contextmanager
    def counted(self, end: socket.socket, address: str) -> Iterator[None]:
        """Counts a connection during the block, in which it may be shut down to make room for others."""
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
        """If a limit is reached, shuts down the oldest connection of this network or of the network with the most."""
        if len(self._pending.get(network, [])) < MAX_PENDING_HANDSHAKES_PER_ADDRESS:
            if sum(len(ends) for ends in self._pending.values()) < MAX_PENDING_HANDSHAKES:
                return
            network = max(self._pending, key=lambda one: len(self._pending[one]))
        ends = self._pending[network]
        ends.append(ends.pop(0))  # the next call shuts down the next oldest
        with contextlib.suppress(OSError):  # it is closed already
            ends[-1].shutdown(socket.SHUT_RDWR)


class AuthenticatedListener:
    """Accepts connections from clients that know a key, in background threads, until it is closed.

    Args:
        host: this machine's name as clients see it; a name in `LOCAL` accepts no other machines.
        port: 0 picks a free port.
        key: the secret that both ends must know.
        on_connection: receives each authenticated connection, in a thread of its own.

    Attributes:
        address: what a client needs to connect.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, host: str, port: int, key: bytes, on_connection: Callable[[AuthenticatedConnection], None]):
        self._server = listen(host, port)
        self._server.settimeout(0.2)
        self.address = ListenerAddress(host, self._server.getsockname()[1], key)
        self._on_connection, self._is_open, self._pending_handshakes = on_connection, True, PendingHandshakes()
        threading.Thread(target=self._take, daemon=True, name="door").start()

    def close(self) -> None:
        self._is_open = False

    def _take(self) -> None:
        with self._server:
            while self._is_open:
                try:
                    end, (address, *_) = self._server.accept()
                except TimeoutError:
                    continue
                except OSError:  # the client is gone already, or this process has too many open files
                    time.sleep(PAUSE)
                    continue
                try:  # in a thread of its own: a client may connect and send nothing
                    threading.Thread(target=self._admit, args=(end, address), daemon=True).start()
                except RuntimeError:  # this process has too many threads
                    end.close()
                    time.sleep(PAUSE)

    def _admit(self, end: socket.socket, address: str) -> None:
        try:
            with self._pending_handshakes.counted(end, address):
                _keep_alive(end)
                connection = prove_as_server(end, self.address.key, time.monotonic() + HANDSHAKE_SECONDS)
        except (AuthenticationError, EOFError, OSError):
            end.close()
            return
        self._on_connection(connection)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening TCP socket, for IPv4 and IPv6 where the system supports both.

    Args:
        host: a name that resolves to loopback addresses binds to loopback; any other name binds to all interfaces.
        port: 0 picks a free port.

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
    """Returns the loopback address that `host` resolves to; None if the name also has other addresses or none."""
    if host in LOCAL:
        return "127.0.0.1"
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(host, None)]
    except (OSError, UnicodeError):
        return None
    return found[0] if found and all(ipaddress.ip_address(one).is_loopback for one in found) else None


def _network_of(address: str) -> str:
    """Returns the unit that connections are counted by: an IPv4 address, or an IPv6 /64, as one machine may use all
    of it."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        return str(known.ipv4_mapped or ipaddress.ip_network((known, 64), strict=False))
    return str(known)


def _keep_alive(end: socket.socket) -> None:
    """Sets socket options that detect a dead peer within minutes."""
    end.setblocking(True)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a frame is sent in three parts
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        end.setsockopt(socket.IPPROTO_TCP, option, seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)  # ms, for unacknowledged data
