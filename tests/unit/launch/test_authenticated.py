"""Authenticated connections: what an attacker between the two ends, or in place of one, can do."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from automodel_rl.launch import listener
from automodel_rl.launch.authenticated import MAC_BYTES, AuthenticatedConnection, prove_as_client, prove_as_server
from automodel_rl.launch.listener import (
    HANDSHAKE_SECONDS,
    MAX_PENDING_HANDSHAKES,
    MAX_PENDING_HANDSHAKES_PER_ADDRESS,
    AuthenticatedListener,
    ListenerAddress,
)

SOON = 30.0
KEY = b"k" * 32
HANDSHAKE_BYTES = {"client": 48 + MAC_BYTES, "server": 32 + MAC_BYTES}


class Spy:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.file),)


def in_background(work: Callable[[], Any]) -> SimpleQueue[Any]:
    """Gets what the work returns or raises."""
    done: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except BaseException as error:
            done.put(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def connected() -> tuple[Any, Any, tuple[socket.socket, socket.socket]]:
    """What client and server get, with an attacker between them, and the attacker's sockets."""
    client, before = socket.socketpair()
    server, behind = socket.socketpair()
    deadline = time.monotonic() + SOON
    ours = in_background(lambda: prove_as_client(client, KEY, deadline))
    theirs = in_background(lambda: prove_as_server(server, KEY, deadline))
    for source, sink, count in (
        (before, behind, 48),
        (behind, before, HANDSHAKE_BYTES["server"]),
        (before, behind, MAC_BYTES),
    ):
        relay(source, sink, count)
    return ours.get(timeout=SOON), theirs.get(timeout=SOON), (before, behind)


def relay(source: socket.socket, sink: socket.socket, count: int) -> None:
    sink.sendall(heard(source, count))


def heard(source: socket.socket, count: int) -> bytes:
    source.settimeout(1.0)
    content = b""
    while len(content) < count:
        try:
            piece = source.recv(count - len(content))
        except TimeoutError:
            break
        if not piece:
            break
        content += piece
    return content


@pytest.fixture(name="pair")
def make_pair() -> Iterator[tuple[AuthenticatedConnection, AuthenticatedConnection, socket.socket, socket.socket]]:
    ours, theirs, (before, behind) = connected()
    with ours, theirs, before, behind:
        yield ours, theirs, before, behind


FRAME = 8 + 2 * MAC_BYTES


def sent(connection: AuthenticatedConnection, attacker: socket.socket, content: bytes) -> bytes:
    """The bytes of a frame on its way."""
    connection.send_bytes(content)
    frame = b""
    while len(frame) < FRAME + len(content):
        frame += attacker.recv(2**20)
    return frame


def test_whoever_relays_a_handshake_can_pass_frames_on_and_nothing_else(pair: Any, tmp_path: Path) -> None:
    ours, theirs, before, behind = pair
    frame = sent(ours, before, b"hello")
    behind.sendall(frame)
    assert theirs.recv_bytes() == b"hello"
    forger = AuthenticatedConnection(behind, os.urandom(32), os.urandom(32))
    forger.send(Spy(tmp_path / "ran"))
    with pytest.raises(OSError, match="failed authentication"):
        theirs.recv()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("attack", ["repeated", "changed", "left out", "sent back", "longer"])
def test_frames_that_an_attacker_touches_end_the_connection(pair: Any, attack: str) -> None:
    ours, theirs, before, behind = pair
    first, second = sent(ours, before, b"first"), sent(ours, before, b"secnd")
    receiver, line = theirs, behind
    match attack:
        case "repeated":
            behind.sendall(first + first)
            assert theirs.recv_bytes() == b"first"
        case "changed":
            behind.sendall(first.replace(b"first", b"worst"))
        case "left out":
            behind.sendall(second)
        case "sent back":
            receiver, line = ours, before
            before.sendall(first)
        case "longer":
            behind.sendall((2**62).to_bytes(8, "big") + first[8:])
    line.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="failed authentication"):
        receiver.recv_bytes()


def test_a_frame_above_the_limit_is_not_read(pair: Any) -> None:
    ours, theirs, before, behind = pair
    behind.sendall(sent(ours, before, b"x" * 1_000)[: 8 + MAC_BYTES])
    with pytest.raises(OSError, match="1,000 bytes: the limit is 999"):
        theirs.recv_bytes(999)


def test_a_server_cannot_use_what_a_client_says_as_its_own_proof() -> None:
    """It reflects all bytes, to a client and between two clients."""
    ends = [socket.socketpair() for _ in range(2)]
    done = [in_background(lambda end=end: prove_as_client(end, KEY, time.monotonic() + SOON)) for end, _ in ends]
    (_, first), (_, second) = ends
    hellos = [heard(stranger, 48) for stranger in (first, second)]
    for stranger, hello in ((first, hellos[1]), (second, hellos[0])):
        stranger.sendall((hello[16:] * 2)[:64])
    assert all(isinstance(one.get(timeout=SOON), AuthenticationError) for one in done)
    for end in (*ends[0], *ends[1]):
        end.close()


def test_slow_clients_keep_nobody_out_and_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every now and then, on as many connections as are allowed and more."""
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 2.0)
    taken: SimpleQueue[AuthenticatedConnection] = SimpleQueue()
    listening = AuthenticatedListener("localhost", 0, KEY, taken.put)
    slow = [
        socket.create_connection(("127.0.0.1", listening.address.port))
        for _ in range(2 * MAX_PENDING_HANDSHAKES_PER_ADDRESS)
    ]
    for one in slow:
        one.sendall(b"a")
    before = time.monotonic()
    with listening.address.connect() as ours:
        assert time.monotonic() - before < HANDSHAKE_SECONDS / 2
        ours.send("hello")
        with taken.get(timeout=SOON) as theirs:
            assert theirs.recv() == "hello"
    slow[-1].settimeout(SOON)
    started = time.monotonic()
    while time.monotonic() - started < SOON:  # it says something all the time, and is hung up on all the same
        try:
            slow[-1].sendall(b"a")
        except OSError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the connection was kept")
    assert listening._pending_handshakes._pending == {}
    listening.close()
    for one in slow:
        one.close()


def test_places_are_counted_by_address() -> None:
    pending_handshakes, closed = listener.PendingHandshakes(), []

    class End:
        def __init__(self, address: str):
            self.address = address

        def shutdown(self, _: int) -> None:
            closed.append(self.address)

    held = [
        pending_handshakes.counted(End(address), address)
        for address in ["10.0.0.1"] * MAX_PENDING_HANDSHAKES_PER_ADDRESS
    ]  # type: ignore[arg-type]
    held += [pending_handshakes.counted(End("10.0.0.2"), "10.0.0.2")]  # type: ignore[arg-type]
    for one in held:
        one.__enter__()
    assert closed == []
    pending_handshakes.counted(End("::ffff:10.0.0.1"), "::ffff:10.0.0.1").__enter__()  # type: ignore[arg-type]
    assert closed == ["10.0.0.1"]
    for number in range(MAX_PENDING_HANDSHAKES):  # one address of IPv6 each, all of one network
        pending_handshakes.counted(End("v6"), f"2001:db8::{number:x}").__enter__()  # type: ignore[arg-type]
    assert "10.0.0.2" not in closed


def test_addresses_without_a_listener_and_with_another_are_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = ListenerAddress("127.0.0.1", other.getsockname()[1], KEY)
        answer = in_background(address.connect)
        end, _ = other.accept()
        end.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" + b" " * 64)
        assert isinstance(answer.get(timeout=SOON), AuthenticationError)
        end.close()
    with pytest.raises(OSError, match="refused"):
        address.connect()
