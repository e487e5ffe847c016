"""Server side of the connection to the ranks: sends jobs in order and detects lost ranks."""

import queue
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.listener import AuthenticatedListener
from automodel_rl.rollout.sampled import Refused
from automodel_rl.serve.joining import answers_of, joined, take_batch
from automodel_rl.serve.messages import CombinedPass, Done, Ready, ServiceJob, StopRequested
from automodel_rl.serve.worker_address import write_address


class RanksLostError(Exception):
    """The ranks ended before a job was done."""


class RefusedError(Exception):
    """The ranks refused a job."""


@dataclass
class _QueuedJob:
    job: ServiceJob
    result: Future
    since: float = field(default_factory=time.monotonic)

    def settle(self, answer: Any) -> None:
        """Sets the answer or error, unless the future was cancelled."""
        if self.result.cancelled():
            return
        if isinstance(answer, Exception):
            self.result.set_exception(answer)
        else:
            self.result.set_result(answer)


class Ranks:
    """Runs jobs on the connected ranks, one at a time, in a thread.

    Args:
        on_lost: called when ranks that were ready are gone.
        on_stop: called when the ranks received a stop signal.
        pass_tokens: most tokens of forward-backward jobs that run as one; 0 runs each alone.
        host: name of this machine for ranks.

    Attributes:
        vocab_size: vocabulary size of the model; 0 before ranks are ready.
        teacher_vocab_sizes: vocabulary sizes of further base models, by name.
        ready: set once ranks have been ready for the first time.
        are_ready: whether ranks are ready now.
        num_jobs: jobs completed since the ranks last became ready.
        peak_bytes: rank 0's peak memory at the end of the last job.
        num_joint: number of passes shared by several runs.
    """

    def __init__(self, on_lost: Callable[[], None], on_stop: Callable[[], None], pass_tokens: int, host: str):
        self.on_lost, self.on_stop, self.pass_tokens = on_lost, on_stop, pass_tokens
        self.vocab_size = 0
        self.teacher_vocab_sizes: dict[str, int] = {}
        self.num_jobs = self.peak_bytes = self.num_joint = 0
        self.ready = threading.Event()
        self.are_ready = False
        self._queue: deque[_QueuedJob] = deque()
        self._running: list[_QueuedJob] = []
        self._condition = threading.Condition()
        self._connection: AuthenticatedConnection | None = None
        self._connections: queue.SimpleQueue[AuthenticatedConnection] = queue.SimpleQueue()
        self._listener = AuthenticatedListener(host, 0, secrets.token_bytes(32), self._connections.put)
        write_address(self._listener.address)
        threading.Thread(target=self._serve, daemon=True, name="ranks").start()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def orders(self) -> list[tuple[ServiceJob, float, bool]]:
        """Running and waiting jobs, each with the seconds since it was submitted, and whether it is running."""
        now = time.monotonic()
        with self._condition:
            both = [(order, True) for order in self._running] + [(order, False) for order in self._queue]
        return [(order.job, now - order.since, runs) for order, runs in both]

    def submit(self, job: ServiceJob) -> Future:
        """Appends a job to the queue. Returns a future of its answer, which may raise RefusedError or
        RanksLostError."""
        order = _QueuedJob(job, Future())
        with self._condition:
            self._queue.append(order)
            self._condition.notify_all()
        return order.result

    def close(self) -> None:
        self._listener.close()

    def drop(self) -> None:
        """Closes the connection to ranks that have ended. Ranks on a lost machine cannot close it themselves."""
        with self._condition:
            connection = self._connection
        if connection is not None:
            connection.shutdown()

    def _serve(self) -> None:
        while True:
            connection = self._connections.get()
            running = self._running = []
            with self._condition:
                self._connection = connection
            try:
                self._run(connection, running)
            except (EOFError, OSError):
                pass  # the ranks have ended
            except Exception:  # without this thread all requests would wait forever
                traceback.print_exc()
            with self._condition:
                self._connection = None
            connection.close()
            if self.are_ready:
                self._fail_jobs(running)

    def _fail_jobs(self, running: list[_QueuedJob]) -> None:
        self.are_ready = False
        self.on_lost()  # first: the errors include what it records
        with self._condition:  # waiting jobs refer to lost state, too
            running += self._queue
            self._queue.clear()
        for order in running:
            order.settle(RanksLostError("the ranks of the server exited"))

    def _run(self, connection: AuthenticatedConnection, running: list[_QueuedJob]) -> None:
        """Sends jobs to ranks until they end. `running` holds the current jobs."""
        while True:
            message = connection.recv()
            match message:
                case Ready(vocab_size, teacher_vocab_sizes):
                    self.vocab_size, self.teacher_vocab_sizes = vocab_size, teacher_vocab_sizes
                    self.num_jobs, self.are_ready = 0, True
                    self.ready.set()
                    self._send_next(connection, running)
                case StopRequested():
                    self.on_stop()
                case Done(answer, peak_bytes):
                    self.num_jobs += 1
                    self.peak_bytes = peak_bytes
                    _settle_jobs(running, answer)
                    running.clear()
                    self._send_next(connection, running)

    def _send_next(self, connection: AuthenticatedConnection, running: list[_QueuedJob]) -> None:
        """Waits for the next job and sends it. Detects ranks that end meanwhile."""
        while True:
            with self._condition:
                if self._queue:
                    running += take_batch(self._queue, self.pass_tokens)  # before sending, which may fail
                    break
                self._condition.wait(WAIT_SECONDS)
            if connection.poll():
                message = connection.recv()  # raises EOFError if the ranks have ended
                if isinstance(message, StopRequested):
                    self.on_stop()
        job = joined([order.job for order in running])
        self.num_joint += isinstance(job, CombinedPass)
        connection.send(job)


WAIT_SECONDS = 0.05


def _settle_jobs(orders: list[_QueuedJob], answer: Any) -> None:
    of_jobs = [answer] * len(orders) if isinstance(answer, Refused) else answers_of([o.job for o in orders], answer)
    for order, one in zip(orders, of_jobs, strict=True):
        order.settle(RefusedError(one.text) if isinstance(one, Refused) else one)
