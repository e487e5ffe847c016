"""Members that join a fleet: who is let in, what waits while none is there, and what goes to others when one leaves."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from automodel_rl.config import WeightSyncConfig
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import JoinedGeneratorConfig
from automodel_rl.errors import InputError, RolloutError, StoppedError
from automodel_rl.generator_messages import Failure, Finished, Generate, GenerateFailed, Request, Sampling, UseVersion
from automodel_rl.generators import fleet as fleet_module
from automodel_rl.generators import joined_members
from automodel_rl.generators import member as member_module
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.joined_members import JoinedMembers
from automodel_rl.generators.joining_messages import (
    FromRun,
    GeneratorStarted,
    JoinRequest,
    Leaving,
    MessageConnection,
    ReadingWeights,
    RunEnded,
    Welcome,
)
from automodel_rl.generators.protocol import Completion, results
from automodel_rl.generators.run_locations import JOIN_FILE, address_in
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.listener import ListenerAddress
from automodel_rl.policy.crew import RemoteCall
from tests.fleets import LocalCrew

SOON = 30.0
"""Seconds in which threads of this process get on."""


WELCOME: Welcome = Welcome(copy=None, writing=None, vllm={}, timeout=60.0, vocab_size=1_000)  # type: ignore[arg-type]


class Crew(LocalCrew):
    """Ranks that lead no generator, and publish a version at every weight sync."""

    def __init__(self) -> None:
        super().__init__({})
        self.published: tuple[int, str] | None = (0, "hash")

    def call(self, call: RemoteCall, shares: Any) -> dict[int, Any]:
        match call.method:
            case "welcome":
                return {0: WELCOME}
            case "published_version":
                return {0: self.published}
        return super().call(call, shares)


class Guest:
    """A generator that has joined, by hand.

    Args:
        folder: the folder that the run publishes to.
        evaluates: whether it writes for evaluations alone.
    """

    def __init__(self, folder: Path, *, evaluates: bool = False):
        address = address_in(folder)
        assert address is not None
        self.connection = MessageConnection(address.connect(), FromRun())
        self.connection.send(JoinRequest("guest", evaluates))
        assert isinstance(self.connection.recv(), Welcome)
        self.connection.send(GeneratorStarted())

    def take(self) -> Any:
        assert self.connection.poll(SOON)
        return self.connection.recv()

    def write(self, count: int | None = None) -> list[int]:
        """Writes so many of the requests that have come, or all, and says which."""
        asked = self.take()
        assert isinstance(asked, Generate)
        for place, request in [*enumerate(asked.requests)][:count]:
            self.connection.send(Finished(asked.number, place, Completion([request.seed], [0.0], "stop")))
        return [request.seed for request in asked.requests[:count]]


def requests(count: int, conversations: bool = False) -> list[Request]:
    return [
        Request([1], seed, Sampling(2), conversation=seed if conversations else None)
        for seed in range(100, 100 + count)
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    fleets = []

    def start(
        *, guests: int = 0, evaluators: int = 0, minutes: float = 1.0, crew: Crew | None = None
    ) -> tuple[Fleet, list[Guest]]:
        """A fleet whose policy version 1 is published, with so many guests. Evaluators come last."""
        fleet = Fleet(crew or Crew())
        fleets.append(fleet)
        choice = JoinedGeneratorConfig(at_least=max(guests, 1), evaluators=evaluators, wait_minutes=minutes)
        spec = GeneratorSpec(choice, 100, WeightSyncConfig(publish=tmp_path / "weights"))
        starting = threading.Thread(target=fleet.start, args=(spec,), daemon=True)
        starting.start()
        found = []
        for number in range(guests):
            found.append(Guest(_when_there(tmp_path / "weights")))
            with fleet._condition:  # so that members have the order of guests
                fleet._condition.wait_for(lambda: len(fleet.members) > number, SOON)  # noqa: B023
        evaluating = [Guest(_when_there(tmp_path / "weights"), evaluates=True) for _ in range(evaluators)]
        starting.join(SOON)
        fleet.sync()
        assert [guest.take() for guest in found] == [UseVersion(0, "hash", 1)] * guests
        return fleet, found + evaluating

    yield start
    for fleet in fleets:
        fleet.close()


def _when_there(folder: Path) -> Path:
    ready = threading.Event()
    while not (folder / JOIN_FILE).is_file():
        ready.wait(0.01)
    return folder


def seeds(completions: list[Completion]) -> list[int]:
    return [completion.token_ids[0] for completion in completions]


def test_requests_are_dealt_and_say_who_wrote_them(start: Any) -> None:
    fleet, guests = start(guests=2)
    completions = fleet.submit(requests(3))
    assert [guest.write() for guest in guests] == [[100, 102], [101]]
    completions = results(completions)
    assert seeds(completions) == [100, 101, 102]
    assert [fleet.name_of(one.writer) for one in completions] == [f"joined generator {n}" for n in (0, 1, 0)]


def test_what_a_guest_that_is_gone_was_to_write_goes_to_others(start: Any) -> None:
    fleet, (first, second) = start(guests=2)
    completions = fleet.submit(requests(4))
    assert first.write(1) == [100]
    first.connection.close()
    assert second.write() == [101, 103]
    assert second.write() == [102]
    assert seeds(results(completions)) == [100, 101, 102, 103]
    assert fleet.lost == fleet.postponed == {}


def test_requests_wait_for_the_next_guest_which_gets_the_version_first(start: Any, tmp_path: Path) -> None:
    fleet, (only,) = start(guests=1)
    completions = fleet.submit(requests(2))
    only.take()
    only.connection.send(Leaving("it was asked to stop"))
    late = Guest(tmp_path / "weights")
    assert late.take() == UseVersion(0, "hash", 1)
    assert late.write() == [100, 101]
    assert seeds(results(completions)) == [100, 101]


def test_guests_that_are_taken_away_again_and_again_are_not_blamed_on_requests(start: Any, tmp_path: Path) -> None:
    fleet, guests = start(guests=1)
    completions = fleet.submit(requests(1))
    for turn in range(30):
        guest = guests.pop()
        guest.take()
        if turn % 2:
            guest.connection.close()
        else:
            guest.connection.send(Leaving("its machine is taken away"))
        guests.append(Guest(tmp_path / "weights"))
        assert guests[0].take() == UseVersion(0, "hash", 1)
    assert guests[0].write() == [100]
    assert seeds(results(completions)) == [100]


def test_a_request_that_takes_every_guest_with_it_becomes_an_error(start: Any, tmp_path: Path) -> None:
    fleet, guests = start(guests=1)
    completions = fleet.submit(requests(1))
    for _ in range(3):
        guest = guests.pop()
        guest.take()
        guest.connection.send(GenerateFailed(0, "out of memory"))
        guests.append(Guest(tmp_path / "weights"))
        guests[0].take()
    (completion,) = results(completions)
    assert completion.error == "3 generators that it was assigned to were lost, the last: out of memory"


def test_turns_of_a_conversation_stay_with_a_guest_while_others_come_and_go(start: Any, tmp_path: Path) -> None:
    fleet, (first, second) = start(guests=2)
    fleet.submit(requests(4, conversations=True))
    assert (first.write(), second.write()) == ([100, 102], [101, 103])
    third = Guest(tmp_path / "weights")
    third.take()
    fleet.submit(requests(4, conversations=True))
    assert (first.write(), second.write()) == ([100, 102], [101, 103])
    second.connection.close()
    fleet.submit(requests(4, conversations=True))
    assert {100, 102} <= {*first.write()}


def test_a_run_that_nobody_joins_ends_with_what_to_do(start: Any) -> None:
    fleet, (only,) = start(guests=1, minutes=0.01)
    only.connection.close()
    completions = fleet.submit(requests(1))
    with pytest.raises(
        RolloutError,
        match=r"no generator has joined within rollout.generator.wait_minutes=0.01 since the last left \(its process",
    ):
        fleet.wait(completions)
    assert not fleet.can_write
    assert "no generator has joined" in fleet.no_member_error


def test_a_run_that_is_asked_to_stop_waits_for_no_generator(start: Any) -> None:
    """A signal to stop waits for the end of the step, which does not come while nobody writes."""
    crew = Crew()
    fleet, (only,) = start(guests=1, minutes=60.0, crew=crew)
    completions = fleet.submit(requests(1))
    only.connection.close()
    threading.Timer(0.1, crew.signals.append, ["SIGTERM"]).start()
    with pytest.raises(StoppedError, match="stopped by SIGTERM while no generator was connected"):
        fleet.wait(completions)


def test_a_run_that_is_asked_to_stop_ends_its_step_while_a_generator_is_there(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "STOP_SECONDS", 0.01)
    crew = Crew()
    fleet, (only,) = start(guests=1, crew=crew)
    crew.signals.append("SIGTERM")
    completions = fleet.submit(requests(1))
    answer = threading.Timer(0.2, only.write)
    answer.start()
    assert seeds(fleet.wait(completions)) == [100]


def test_a_member_is_waited_for_from_the_moment_that_something_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluators may all be gone while nothing is asked of them."""
    now = [0.0]
    monkeypatch.setattr(joined_members.time, "monotonic", lambda: now[0])
    joined = JoinedMembers(JoinedGeneratorConfig(wait_minutes=1), Path("weights"), "generate", iter(range(9)), 9)
    now[0] = 1000.0
    task: Any = object()
    joined.hold([task])
    now[0] = 1059.0
    assert joined.take_expired() == []
    now[0] = 1061.0
    assert joined.take_expired() == [task]
    assert joined.has_timed_out


def test_too_few_generators_at_the_start_are_refused(tmp_path: Path) -> None:
    fleet = Fleet(Crew())
    choice = JoinedGeneratorConfig(at_least=2, wait_minutes=0.001)
    with pytest.raises(InputError, match="at_least=2: only 0 joined within wait_minutes=0.001: start more with"):
        fleet.start(GeneratorSpec(choice, 100, WeightSyncConfig(publish=tmp_path / "weights")))
    fleet.close()


def test_weights_that_could_not_be_published_end_the_run(start: Any) -> None:
    crew = Crew()
    fleet, _ = start(guests=1, crew=crew)
    crew.published = None
    with pytest.raises(RolloutError, match="the weights for joined generators could not be written"):
        fleet.sync()


def test_evaluators_keep_the_version_that_they_are_told_and_get_no_requests_of_training(
    start: Any, tmp_path: Path
) -> None:
    crew = Crew()
    fleet, (writer, evaluator) = start(guests=1, evaluators=1, crew=crew)
    assert fleet.evaluators is not None
    fleet.evaluate(*fleet.newest)
    evaluated = fleet.evaluators.submit(requests(3))
    crew.published = (2, "newer")
    fleet.sync()
    trained = fleet.submit(requests(2))
    assert writer.take() == UseVersion(2, "newer", 2)
    assert writer.write() == seeds(results(trained)) == [100, 101]
    assert evaluator.take() == UseVersion(0, "hash", 1)
    assert evaluator.write(1) == [100]
    evaluator.connection.close()
    assert not writer.connection.poll(0.1)  # what evaluators were to write waits for another one
    late = Guest(tmp_path / "weights", evaluates=True)
    assert late.take() == UseVersion(0, "hash", 1)
    assert late.write() == [101, 102]
    completions = results(evaluated)
    assert seeds(completions) == [100, 101, 102]
    assert len({fleet.name_of(one.writer) for one in completions}) == 2
    assert (fleet.evaluators.policy_version, fleet.policy_version) == (1, 2)
    writer.connection.close()
    waiting = fleet.submit(requests(1))
    assert not late.connection.poll(0.1)
    assert seeds_of_late_writer(tmp_path / "weights") == seeds(results(waiting)) == [100]
    fleet.close()
    assert isinstance(late.take(), RunEnded)


def seeds_of_late_writer(folder: Path) -> list[int]:
    writer = Guest(folder)
    assert writer.take() == UseVersion(2, "newer", 2)
    return writer.write()


def test_evaluators_are_waited_for_and_only_let_in_where_they_have_something_to_do(start: Any, tmp_path: Path) -> None:
    fleet = Fleet(Crew())
    choice = JoinedGeneratorConfig(evaluators=2, wait_minutes=0.05)
    spec = GeneratorSpec(choice, 100, WeightSyncConfig(publish=tmp_path / "others"))
    problems = list[InputError]()

    def starts() -> None:
        with pytest.raises(InputError) as raised:
            fleet.start(spec)
        problems.append(raised.value)

    starting = threading.Thread(target=starts, daemon=True)
    starting.start()
    guest = Guest(_when_there(tmp_path / "others"))
    starting.join(SOON)
    guest.connection.close()
    text = str(problems[0])
    assert "evaluators=2: only 0 joined within wait_minutes=0.05: start more with automodel-rl generate" in text
    assert "--evaluate, or raise wait_minutes" in text
    fleet.close()
    start(guests=1)
    address = address_in(tmp_path / "weights")
    assert address is not None
    with MessageConnection(address.connect(), FromRun()) as connection:
        connection.send(JoinRequest("guest", evaluates=True))
        answer = connection.recv()
        assert answer == Failure("the run accepts no evaluators: set rollout.generator.evaluators, or omit --evaluate")


def test_strangers_and_other_releases_are_not_let_in(start: Any, tmp_path: Path) -> None:
    start(guests=1)
    folder = tmp_path / "weights"
    assert (folder / JOIN_FILE).stat().st_mode & 0o77 == 0
    address = address_in(folder)
    assert address is not None
    with MessageConnection(address.connect(), FromRun()) as connection:
        connection.send(JoinRequest("guest", release="0.1 of another"))
        answer = connection.recv()
        assert isinstance(answer, Failure)
        assert answer.text.endswith("not 0.1 of another: use the same release")
    values = json.loads((folder / JOIN_FILE).read_text())
    (folder / JOIN_FILE).write_text(json.dumps({**values, "key": "00" * 32}))
    stranger = address_in(folder)
    assert stranger is not None
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        stranger.connect()


@pytest.mark.parametrize(
    "written",
    [
        "hello",
        None,
        Completion([2**70, -5], [0.0, 0.0], "stop"),
        Completion([-5], [0.0], "stop"),
        Completion([1, 1], [0.0], "stop"),
        Completion([1] * 3, [0.0] * 3, "length"),
        Completion(["1"], [0.0], "stop"),  # type: ignore[list-item]
        Completion([1.5], [0.0], "stop"),  # type: ignore[list-item]
        Completion([1], ["x"], "stop"),  # type: ignore[list-item]
        Completion([1], [0.0], "done"),  # type: ignore[arg-type]
        Completion([1], [0.0], "stop", versions=(10**400, 1)),
        Completion([1], [0.0], "stop", num_cached=10**400),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1, -1, 2**70])
def test_a_generator_that_sends_what_cannot_be_is_lost_and_others_write(
    capfd: pytest.CaptureFixture[str], start: Any, written: Any, place: int
) -> None:
    fleet, (bad, good) = start(guests=2)
    completions = fleet.submit(requests(2))
    asked = bad.take()
    bad.connection.send(Finished(asked.number, place, written))
    assert sorted(good.write() + good.write()) == [100, 101]
    assert seeds(results(completions)) == [100, 101]
    said = capfd.readouterr()
    assert "joined generator 0 has left: " in said.out
    assert said.err == ""


def test_a_generator_cannot_answer_for_another(start: Any) -> None:
    fleet, (bad, good) = start(guests=2)
    completions = fleet.submit(requests(2))
    bad.take()
    others = good.take()
    bad.connection.send(Finished(others.number, 0, Completion([7], [0.0], "stop")))
    assert good.write() == [100]
    good.connection.send(Finished(others.number, 0, Completion([101], [0.0], "stop")))
    assert seeds(results(completions)) == [100, 101]


def test_only_what_was_asked_for_and_reading_for_an_hour_show_that_it_is_alive(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    fleet, _ = start(guests=1)
    (member,) = fleet.members
    monkeypatch.setattr(member_module.time, "monotonic", lambda: now[0])
    for minutes, message, counts in (
        (1, ReadingWeights(), True),
        (30, Finished(999, 0, Completion([1], [0.0], "stop")), False),
        (59, ReadingWeights(), True),
        (61, ReadingWeights(), False),
    ):
        now[0] += 60 * minutes - (now[0] - member._version_sent_at)
        before = member.last_heard
        fleet._handle_message(member, message)
        assert (member.last_heard > before) == counts, (minutes, message)
    fleet.sync()
    fleet._handle_message(member, ReadingWeights())
    assert member.last_heard == now[0]
    fleet.submit(requests(2))
    (number,) = fleet._assignments
    for place, counts in ((0, True), (0, False), (1, True)):  # each completion once
        now[0] += 7200
        before = member.last_heard
        fleet._handle_message(member, Finished(number, place, Completion([1], [0.0], "stop")))
        assert (member.last_heard > before) == counts, place


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"Finished",
        b"Welcome\n{}",
        b"RunEnded\n{}",
        b"GenerateFailed\n" + b"[" * 200_000,
        b"\xff\n{}",
    ],
    ids=lambda content: str(content[:12]),
)
def test_what_is_no_message_ends_the_connection_and_nothing_else(start: Any, content: bytes) -> None:
    fleet, (bad, good) = start(guests=2)
    completions = fleet.submit(requests(2))
    bad.take()
    bad.connection._connection.send_bytes(content)
    assert sorted(good.write() + good.write()) == [100, 101]
    assert seeds(results(completions)) == [100, 101]


def test_the_hash_of_the_first_version_comes_from_the_run(start: Any, tmp_path: Path) -> None:
    start(guests=1)
    address = address_in(tmp_path / "weights")
    assert address is not None
    with MessageConnection(address.connect(), FromRun()) as late:
        late.send(JoinRequest("late"))
        welcome = late.recv()
        assert isinstance(welcome, Welcome)
        assert welcome.newest == UseVersion(0, "hash", 1)


class Stranger:
    """Listens where a run was, and passes what it hears on to a live run and back."""

    def __init__(self, run: ListenerAddress):
        self.run, self.heard = run, b""
        self.server = socket.create_server(("127.0.0.1", 0))
        self.lines: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        generator, _ = self.server.accept()
        line = generator, socket.create_connection((self.run.host, self.run.port))
        self.lines.append(line)
        for source, sink in (line, line[::-1]):
            threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(2**16):
                self.heard += piece
                sink.sendall(piece)

    def close(self) -> None:
        for end in (self.server, *(end for line in self.lines for end in line)):
            end.close()


def test_a_stranger_between_a_waiting_generator_and_a_live_run_gets_nothing(start: Any, tmp_path: Path) -> None:
    """It is let in by neither, and can make neither run anything."""
    fleet, _ = start(guests=1)
    address = address_in(tmp_path / "weights")
    assert address is not None
    stranger = Stranger(address)
    with ListenerAddress("127.0.0.1", stranger.server.getsockname()[1], address.key).connect() as generator:
        joining = MessageConnection(generator, FromRun())
        joining.send(JoinRequest("guest"))
        assert isinstance(joining.recv(), Welcome)  # passed on, as it was sent
        to_generator, to_run = stranger.lines[0]
        assert address.key not in stranger.heard
        for end in (to_generator, to_run):  # what it says itself
            with contextlib.suppress(OSError):  # the connection ends at the first part that is not from its other end
                AuthenticatedConnection(end.dup(), b"guess", b"guess").send(Ran(tmp_path / "ran"))
        with pytest.raises(OSError, match="failed authentication"):
            generator.recv()
    assert len(fleet.members) == 1
    assert not (tmp_path / "ran").exists()
    stranger.close()


class Ran:
    """Unpickled, it leaves a folder behind."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_the_address_goes_with_the_run_and_its_end_is_told(start: Any, tmp_path: Path) -> None:
    fleet, (guest,) = start(guests=1)
    address = address_in(tmp_path / "weights")
    assert address is not None
    with MessageConnection(address.connect(), FromRun()) as late:
        late.send(JoinRequest("late"))
        assert isinstance(late.recv(), Welcome)
        fleet.close()
        assert isinstance(guest.take(), RunEnded)
        assert late.poll(SOON)
        assert isinstance(late.recv(), RunEnded)
    assert address_in(tmp_path / "weights") is None
    (tmp_path / "weights" / JOIN_FILE).touch(mode=0o600)
    (tmp_path / "weights" / JOIN_FILE).write_text("{}")
    with pytest.raises(InputError, match="is not a run's address"):
        address_in(tmp_path / "weights")


def test_a_second_run_takes_no_folder_of_another_and_leaves_its_address(start: Any, tmp_path: Path) -> None:
    first, _ = start(guests=1)
    spec = GeneratorSpec(JoinedGeneratorConfig(), 100, WeightSyncConfig(publish=tmp_path / "weights"))
    with pytest.raises(InputError, match="another run is using this folder"):
        Fleet(Crew()).start(spec)
    address = address_in(tmp_path / "weights")
    (tmp_path / "weights" / JOIN_FILE).unlink()  # as if its machine were gone
    second, _ = start(guests=1)
    assert address_in(tmp_path / "weights") != address
    first.close()
    assert address_in(tmp_path / "weights") is not None
    second.close()
    assert address_in(tmp_path / "weights") is None


def test_an_address_that_others_could_have_written_is_not_trusted(start: Any, tmp_path: Path) -> None:
    start(guests=1)
    (tmp_path / "weights" / JOIN_FILE).chmod(0o666)
    with pytest.raises(InputError, match="other users can read or write it"):
        address_in(tmp_path / "weights")
    (tmp_path / "weights" / JOIN_FILE).chmod(0o600)


def test_the_door_stays_open_after_an_error_and_to_silent_strangers(start: Any, tmp_path: Path) -> None:
    fleet, _ = start(guests=1)
    address, door = address_in(tmp_path / "weights"), fleet._join_service.listener._listener
    assert address is not None
    accept, failed = door._server.accept, []

    def fails_once() -> Any:
        if not failed:
            failed.append(True)
            raise OSError(24, "Too many open files")
        return accept()

    with mock.patch.object(door, "_server", mock.MagicMock(accept=fails_once)):
        Guest(tmp_path / "weights")
        assert failed
    silent = [socket.create_connection(("127.0.0.1", address.port)) for _ in range(3)]
    Guest(tmp_path / "weights")
    for one in silent:
        one.close()
