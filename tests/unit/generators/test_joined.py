"""A generator that has joined: what it tells the program while it reads weights, and when it cannot."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Finished, Generate, GenerateFailed, Request, Sampling, UseVersion
from automodel_rl.generators import joined
from automodel_rl.generators.joined import JoinedGenerator, JoinOptions, _WriterLostError, generate
from automodel_rl.generators.joining_messages import (
    FromGenerator,
    FromRun,
    GeneratorStarted,
    Leaving,
    MessageConnection,
    ReadingWeights,
    RunEnded,
)
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.run_locations import RemoteRun, SharedFolder
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.listener import AuthenticatedListener
from automodel_rl.weight_sync.published_sync import VersionLoad

SOON = 30.0

BROUGHT = VersionLoad(num_bytes=2**20, read_seconds=0.1, send_seconds=0.2)


@pytest.fixture(name="ends")
def make_ends() -> Iterator[tuple[MessageConnection, MessageConnection]]:
    """The program's end of a connection, and the generator's."""
    ours, theirs = socket.socketpair()
    with (
        MessageConnection(AuthenticatedConnection(ours, b"run", b"generator"), FromGenerator()) as program,
        MessageConnection(AuthenticatedConnection(theirs, b"generator", b"run"), FromRun()) as generator,
    ):
        yield program, generator


def started(theirs: MessageConnection, sync: Any) -> tuple[JoinedGenerator, threading.Thread, list[BaseException]]:
    writer, raised = mock.Mock(), list[BaseException]()
    written: Future[Completion] = Future()
    written.set_result(Completion([1], [0.0], "stop"))
    writer.submit.return_value = [written]
    generator = JoinedGenerator(theirs, writer, sync, 9)

    def run() -> None:
        try:
            generator.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return generator, thread, raised


def take(ours: MessageConnection) -> Any:
    assert ours.poll(SOON)
    return ours.recv()


def reading(
    ours: MessageConnection, theirs: MessageConnection
) -> tuple[threading.Event, threading.Thread, list[BaseException]]:
    """A generator that reads a version until the event is set, its thread, and what that raises."""
    sync, is_read = mock.Mock(), threading.Event()
    sync.load_version.side_effect = lambda *_: is_read.wait(SOON) and BROUGHT
    _, thread, raised = started(theirs, sync)
    assert isinstance(take(ours), GeneratorStarted)
    ours.send(UseVersion(1, "hash", 1))
    return is_read, thread, raised


def test_weights_that_cannot_be_read_here_blame_no_request(ends: tuple[MessageConnection, MessageConnection]) -> None:
    ours, theirs = ends
    sync = mock.Mock()
    sync.load_version.side_effect = [BROUGHT, InputError("http://train:8901: cannot be read")]
    _, thread, raised = started(theirs, sync)
    assert isinstance(take(ours), GeneratorStarted)
    ours.send(UseVersion(1, "hash", 1))
    ours.send(Generate(4, [Request([1], 0, Sampling(2))]))
    assert isinstance(take(ours), Finished)
    ours.send(UseVersion(2, "hash", 2))
    assert take(ours) == Leaving("http://train:8901: cannot be read")
    assert isinstance(take(ours), GenerateFailed)
    thread.join(SOON)
    (error,) = raised
    assert isinstance(error, _WriterLostError)
    assert error.has_written


def test_it_shows_that_it_is_alive_while_it_reads(
    ends: tuple[MessageConnection, MessageConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "HEARTBEAT_SECONDS", 0.01)
    ours, theirs = ends
    is_read, thread, raised = reading(ours, theirs)
    assert [isinstance(take(ours), ReadingWeights) for _ in range(3)] == [True] * 3
    is_read.set()
    ours.send(RunEnded())
    thread.join(SOON)
    assert (thread.is_alive(), raised) == (False, [])


def test_it_takes_what_comes_while_it_reads(ends: tuple[MessageConnection, MessageConnection]) -> None:
    """The run's socket has room for a part of it, and counts a generator as gone that takes nothing for two minutes."""
    ours, theirs = ends
    is_read, thread, raised = reading(ours, theirs)
    sent = threading.Thread(target=lambda: ours.send(Generate(4, [Request([1] * 2_000_000, 0, Sampling(2))])))
    sent.start()
    sent.join(SOON)
    assert not sent.is_alive()
    is_read.set()
    assert isinstance(take(ours), Finished)
    ours.send(RunEnded())
    thread.join(SOON)
    assert (thread.is_alive(), raised) == (False, [])


def test_another_key_is_told_at_once(tmp_path: Path) -> None:
    door = AuthenticatedListener("localhost", 0, b"key", lambda connection: connection.close())
    with pytest.raises(InputError, match="the key does not match"):
        generate(RemoteRun("localhost", door.address.port, b"another"), JoinOptions(), minutes=10)
    door.close()


@pytest.mark.parametrize("place", [RemoteRun("a..b", 8900, b""), SharedFolder(Path("nowhere"))], ids=str)
def test_what_is_waited_for_is_said(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="start the run, or raise --wait"):
        generate(place, JoinOptions(), minutes=0.0001)
    assert capsys.readouterr().out.startswith("waiting up to 0.0001 minutes: ")
