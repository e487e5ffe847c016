"""Doors: who can reach them, over IPv4 and IPv6."""

import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

from automodel_rl.launch import listener as listener_module
from automodel_rl.launch.listener import AuthenticatedListener, ListenerAddress

SOON = 30.0


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


OVER_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture(name="taken")
def make_taken() -> SimpleQueue[Connection]:
    return SimpleQueue()


def says_hello(address: ListenerAddress, taken: SimpleQueue[Connection]) -> bool:
    with address.connect() as ours:
        ours.send("hello")
        with taken.get(timeout=SOON) as theirs:
            return bool(theirs.recv() == "hello")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", pytest.param("::1", marks=OVER_IPV6)])
def test_names_of_a_machine_for_itself_let_nobody_in_from_elsewhere(host: str, taken: SimpleQueue[Connection]) -> None:
    door = AuthenticatedListener(host, 0, b"key", taken.put)
    assert door._server.getsockname()[0] in ("127.0.0.1", "127.0.1.1", "::1")
    assert says_hello(door.address, taken)
    door.close()


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=OVER_IPV6)])
def test_others_come_over_either_protocol(address: str, taken: SimpleQueue[Connection]) -> None:
    door = AuthenticatedListener("a-name-that-others-know", 0, b"key", taken.put)
    assert says_hello(ListenerAddress(address, door.address.port, b"key"), taken)
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        ListenerAddress(address, door.address.port, b"another").connect()
    door.close()


def test_a_handshake_that_is_broken_off_to_make_room_is_tried_again(
    taken: SimpleQueue[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many strangers at the rank's own address, of whom each takes a place."""
    monkeypatch.setattr(listener_module, "MAX_PENDING_HANDSHAKES_PER_ADDRESS", 1)
    monkeypatch.setattr(listener_module, "PAUSE", 0.01)
    proofs, at_rest = iter([True, False]), listener_module.prove_as_client

    def prove(end: socket.socket, key: bytes, deadline: float) -> Connection:
        if next(proofs):  # another one comes before this one has proved anything
            socket.create_connection(end.getpeername()).close()
            assert end.recv(1) == b""
        return at_rest(end, key, deadline)

    monkeypatch.setattr(listener_module, "prove_as_client", prove)
    door = AuthenticatedListener("localhost", 0, b"key", taken.put)
    assert says_hello(door.address, taken)
    door.close()
