"""A generator that joins a run and reads its published weights: `automodel-rl generate --join PLACE`."""

import functools
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from types import FrameType
from typing import Any

import torch

from automodel_rl.config.rollout import LARGEST_BUFFER
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.generator_messages import (
    Failure,
    Finished,
    Generate,
    GenerateFailed,
    Message,
    UseVersion,
    VllmSettings,
)
from automodel_rl.generators.generator_process import GeneratorProcess
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
from automodel_rl.generators.make_generator import CPU_OPTIONS, start_transformers
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.run_locations import RemoteRun, RunLocation
from automodel_rl.generators.vllm_process import start_vllm
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.support.description import describe_model
from automodel_rl.weight_sync.ipc import IpcTransport
from automodel_rl.weight_sync.published_sync import PublishedSync, VersionLoad
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm import VllmSameDevice

POLL_SECONDS = 0.5
"""Seconds between attempts to find and reach a run."""

HEARTBEAT_SECONDS = 10.0
"""Seconds between signs of life while weights are read."""

MAX_LOST_WRITERS = 3
"""Consecutive failures of the writing process at which this generator gives up. The run reassigns their requests, or
fails them."""


@dataclass(frozen=True)
class JoinOptions:
    """Settings that a joining generator chooses itself.

    Attributes:
        python: interpreter of an environment with vLLM; None to write with transformers.
        memory_fraction: fraction of the GPU's memory for vLLM.
        evaluates: whether it only writes for evaluations.
    """

    python: str | None = None
    memory_fraction: float = 0.9
    evaluates: bool = False


class _StopRequest(BaseException):
    """A stop signal. Derived from BaseException, so that no error handler catches it."""


class _WriterLostError(InputError):
    """The writing process has exited or failed. `has_written` is whether it had completed a request before."""

    def __init__(self, message: str, has_written: bool):
        super().__init__(message)
        self.has_written = has_written


def generate(location: RunLocation, choice: JoinOptions, minutes: float) -> None:
    """Writes completions for a run until it ends or a stop signal arrives. If the run is interrupted, waits for it to
    resume.

    Args:
        minutes: longest wait for a run.

    Raises:
        InputError: no run was found, the run uses another release of this package, or the generator cannot write.
    """
    lost_in_a_row = 0
    try:
        with _stopped_by_signals():
            while True:
                try:
                    has_ended = _join(location, choice, minutes)
                except _WriterLostError as error:
                    lost_in_a_row = 1 if error.has_written else lost_in_a_row + 1
                    if lost_in_a_row == MAX_LOST_WRITERS:
                        raise
                    print(f"{error}; rejoining with a new process", flush=True)
                    time.sleep(POLL_SECONDS)
                    continue
                lost_in_a_row = 0
                if has_ended:
                    break
                print(f"lost the connection to the run; waiting up to {minutes:g} minutes for it to resume", flush=True)
                time.sleep(POLL_SECONDS)
    except _StopRequest:
        print("left the run", flush=True)
        return
    print("the run has ended", flush=True)


def _join(location: RunLocation, choice: JoinOptions, minutes: float) -> bool:
    """Joins a run and writes until the connection closes. Returns whether the run has ended."""
    with _connect(location, minutes) as connection:
        welcome = _ask(connection, choice.evaluates)
        if welcome is None:
            return False
        sync = PublishedSync(location.files(welcome.weights), LARGEST_BUFFER)
        with _heartbeats(connection.send):
            try:
                if welcome.newest is not None:  # in advance, so that no request waits for it
                    sync.read_ahead(welcome.newest.version, welcome.newest.digest)
            except InputError as error:
                raise _WriterLostError(f"this generator cannot read weights: {error}", has_written=False) from None
            generator, transport = _start(welcome, choice)
        try:
            sync.connect(transport)
            return JoinedGenerator(connection, generator, sync, welcome.vocab_size).run()
        finally:
            generator.close()


@contextmanager
def _heartbeats(send: Callable[[Message], None]) -> Iterator[None]:
    """Sends the program signs of life during the block, which may take long."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                send(ReadingWeights())

    teller = threading.Thread(target=tell, daemon=True, name="signs of life")
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def _connect(location: RunLocation, minutes: float) -> MessageConnection:
    """Waits for the run and connects to it."""
    deadline, problem, told = time.monotonic() + 60 * minutes, "no run publishes there", ""
    while True:
        address = location.address()
        try:
            if address is not None:
                return MessageConnection(address.connect(), FromRun())
        except AuthenticationError:
            if isinstance(location, RemoteRun):
                raise InputError(
                    f"--join {location}: the key does not match: pass the file with the run's key as --key"
                ) from None
            problem = "the key does not match the run's"
        except (OSError, EOFError, UnicodeError) as error:
            problem = f"the run cannot be reached ({describe_root_cause(error)})"
        if problem != told:
            print(f"waiting up to {minutes:g} minutes: {problem}", flush=True)
            told = problem
        if time.monotonic() >= deadline:
            raise InputError(f"--join {location}: {problem}, after {minutes:g} minutes: start the run, or raise --wait")
        time.sleep(POLL_SECONDS)


def _ask(connection: MessageConnection, evaluates: bool) -> Welcome | None:
    """Requests to join. Returns the run's settings; None if the connection is lost."""
    try:
        connection.send(JoinRequest(f"process {os.getpid()} of {socket.gethostname()}", evaluates))
        answer = connection.recv()
    except (OSError, EOFError):
        return None
    except Exception as error:  # a class that does not exist here
        answer = Failure(f"unreadable answer: {describe_root_cause(error)}")
    if not isinstance(answer, Welcome):
        text = answer.text if isinstance(answer, Failure) else "unexpected answer"
        raise InputError(f"the run refused this generator: {text}")
    return answer


def _start(welcome: Welcome, choice: JoinOptions) -> tuple[GeneratorProcess, Transport]:
    """Starts the writing process and its transport for weights."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if choice.python is None:
        writer = start_transformers(replace(welcome.copy, device=device), welcome.writing, visible=None)
        return writer, IpcTransport(writer, device, welcome.timeout)
    if describe_model(welcome.copy.config).quantization:
        raise InputError("--vllm: vLLM would keep quantized weights, but the run publishes plain ones: omit --vllm")
    on_device = CPU_OPTIONS if device.type == "cpu" else {"gpu_memory_utilization": choice.memory_fraction}
    own = {"weight_transfer_config": {"backend": "same_device"}, **on_device}
    engine = start_vllm(choice.python, VllmSettings({**welcome.vllm, **own}, welcome.writing.ends))
    assert isinstance(engine, GeneratorProcess)
    return engine, VllmSameDevice(engine, device, welcome.timeout)


class JoinedGenerator:
    """Handles the program's messages in order: versions of weights, and requests.

    Args:
        connection: the connection to the program.
        generator: the writing process.
        sync: loads published versions into it.
    """

    def __init__(
        self, connection: MessageConnection, generator: GeneratorProcess, sync: PublishedSync, vocab_size: int
    ):
        self.connection, self.generator, self.sync, self.vocab_size = connection, generator, sync, vocab_size
        self._send_lock = threading.RLock()  # a signal may arrive while this thread sends
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._end: list[RunEnded | None] = []
        self._problem, self._has_written = "", False

    def run(self) -> bool:
        """Handles messages until the connection closes. Returns whether the run has ended, rather than lost contact.

        Raises:
            _WriterLostError: the generator cannot write or read a version. The program has been notified.
        """
        self._send(GeneratorStarted())
        threading.Thread(target=self._receive, daemon=True, name="receiving").start()
        try:
            while (message := self._next()) is not None:
                if isinstance(message, RunEnded):
                    return True
                if isinstance(message, Exception):
                    raise message
                self._handle_message(message)
        except _StopRequest:
            self._send(Leaving("it was asked to stop"))
            raise
        if self._problem:
            raise _WriterLostError(f"this generator cannot write: {self._problem}", self._has_written)
        return False

    def _next(self) -> Any:
        """Returns the program's next message. After the end of the run or connection, returns only `RunEnded` or
        None."""
        message = self._received.get()
        return self._end[0] if self._end else message

    def _receive(self) -> None:
        """Queues the program's messages in a thread, since reading a version may take longer than its send timeout."""
        try:
            while True:
                message = self.connection.recv()
                if isinstance(message, RunEnded):
                    self._end.append(message)
                self._received.put(message)
        except (EOFError, OSError):
            self._end.append(None)
            self._received.put(None)
        except Exception as error:  # unreadable message
            self._received.put(error)

    def _handle_message(self, message: UseVersion | Generate) -> None:
        try:
            if isinstance(message, UseVersion):
                with _heartbeats(self._send):
                    load = self.sync.load_version(message.version, message.digest, message.policy_version)
                _print_version_load(message.version, load)
            else:
                for index, completion in enumerate(self.generator.submit(message.requests)):
                    completion.add_done_callback(functools.partial(self._finish, message, index))
        except InputError as error:  # unreadable weights: not counted against requests
            self._send(Leaving(str(error)))
            self._lost(error)
        except Exception as error:  # of the writing process, or an invalid message
            self._lost(error)

    def _finish(self, asked: Generate, index: int, done: "Future[Completion]") -> None:
        try:
            completion = done.result().checked(asked.requests[index], self.vocab_size)
        except Exception as error:
            self._lost(error)
            return
        self._has_written = True
        self._send(Finished(asked.number, index, completion))

    def _lost(self, error: BaseException) -> None:
        """Reports to the program that this generator has failed, and closes the connection."""
        problem = describe_root_cause(error)
        self._problem = self._problem or problem
        self._send(GenerateFailed(0, problem))
        self.connection.shutdown()

    def _send(self, message: Message) -> None:
        try:
            with self._send_lock:
                self.connection.send(message)
        except OSError:
            pass  # the program has closed the connection, as `run` sees, too


def _print_version_load(version: int, load: VersionLoad) -> None:
    read = f"{load.num_bytes / 2**20:,.1f} MiB read in {load.read_seconds:.2f} s"
    given = f"loaded in {load.send_seconds:.2f} s"
    print(f"weights of version {version}: {read}, {given}", flush=True)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raises _StopRequest at the first stop signal inside the block. Further signals are ignored."""

    def stop(number: int, _: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise _StopRequest(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
