"""The server's end of the ranks: it gives them jobs in order, and notices when they are gone."""

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
from automodel_rl.launch.door import Door
from automodel_rl.rollout.sampled import Refused
from automodel_rl.serve.joining import answers_of, joined, take_together
from automodel_rl.serve.messages import Done, Ready, ServiceJob, StopAsked, Together
from automodel_rl.serve.worker_address import write_address


class RanksLostError(Exception):
    """The ranks ended before a job was done."""


class RefusedError(Exception):
    """The ranks refused a job."""


@dataclass
class _Order:
    job: ServiceJob
    result: Future
    since: float = field(default_factory=time.monotonic)

    def settle(self, answer: Any) -> None:
        """Gives the answer, or raises it if it is an error, unless nobody waits for it any more."""
        if self.result.cancelled():
            return
        if isinstance(answer, Exception):
            self.result.set_exception(answer)
        else:
            self.result.set_result(answer)


class Ranks:
    """Runs jobs on the ranks that connect, one after the other, in a thread.

    Args:
        on_lost: called when ranks are gone that had been ready.
        on_stop: called when the ranks got a signal to stop.
        pass_tokens: most tokens of forwards and backwards that run as one; 0 if each runs alone.
        host: the name of this machine for ranks.

    Attributes:
        vocab_size: number of token ids of the model; 0 before ranks are ready.
        of_teachers: those of further base models by name.
        ready: set when ranks have become ready for the first time.
        are_there: whether ranks are ready now.
        num_jobs: number of jobs that ranks have done since they last became ready.
        peak_bytes: the most memory that rank 0 had used when it did the last of them.
        num_joint: number of passes in which several runs met.
    """

    def __init__(self, on_lost: Callable[[], None], on_stop: Callable[[], None], pass_tokens: int, host: str):
        self.on_lost, self.on_stop, self.pass_tokens = on_lost, on_stop, pass_tokens
        self.vocab_size = 0
        self.of_teachers: dict[str, int] = {}
        self.num_jobs = self.peak_bytes = self.num_joint = 0
        self.ready = threading.Event()
        self.are_there = False
        self._orders: deque[_Order] = deque()
        self._running: list[_Order] = []
        self._came = threading.Condition()
        self._connection: AuthenticatedConnection | None = None
        self._admitted: queue.SimpleQueue[AuthenticatedConnection] = queue.SimpleQueue()
        self._door = Door(host, 0, secrets.token_bytes(32), self._admitted.put)
        write_address(self._door.address)
        threading.Thread(target=self._serve, daemon=True, name="ranks").start()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait."""
        return len(self._orders)

    @property
    def orders(self) -> list[tuple[ServiceJob, float, bool]]:
        """The jobs that run and those that wait: each with the seconds since it came, and whether it runs."""
        now = time.monotonic()
        with self._came:
            both = [(order, True) for order in self._running] + [(order, False) for order in self._orders]
        return [(order.job, now - order.since, runs) for order, runs in both]

    def submit(self, job: ServiceJob) -> Future:
        """Adds a job to the end of the queue.

        Returns:
            Its answer. It raises RefusedError or RanksLostError.
        """
        order = _Order(job, Future())
        with self._came:
            self._orders.append(order)
            self._came.notify_all()
        return order.result

    def close(self) -> None:
        """Takes no more ranks."""
        self._door.close()

    def drop(self) -> None:
        """Lets go of ranks that have ended. Those on a machine that is gone could not say so."""
        with self._came:
            connection = self._connection
        if connection is not None:
            connection.hang_up()

    def _serve(self) -> None:
        while True:
            connection = self._admitted.get()
            running = self._running = []
            with self._came:
                self._connection = connection
            try:
                self._run(connection, running)
            except (EOFError, OSError):
                pass  # they have ended
            except Exception:  # without this thread all would wait for ever
                traceback.print_exc()
            with self._came:
                self._connection = None
            connection.close()
            if self.are_there:
                self._lose(running)

    def _lose(self, running: list[_Order]) -> None:
        """Fails all jobs, for the ranks are gone."""
        self.are_there = False
        self.on_lost()  # first, for the errors say what it notes
        with self._came:  # those that wait are for states that are gone, too
            running += self._orders
            self._orders.clear()
        for order in running:
            order.settle(RanksLostError("the ranks of the server ended"))

    def _run(self, connection: AuthenticatedConnection, running: list[_Order]) -> None:
        """Gives jobs to ranks until they end.

        Args:
            connection: the connection to rank 0.
            running: gets the jobs that run.
        """
        while True:
            message = connection.recv()
            match message:
                case Ready(vocab_size, of_teachers):
                    self.vocab_size, self.of_teachers = vocab_size, of_teachers
                    self.num_jobs, self.are_there = 0, True
                    self.ready.set()
                    self._send_next(connection, running)
                case StopAsked():
                    self.on_stop()
                case Done(answer, peak_bytes):
                    self.num_jobs += 1
                    self.peak_bytes = peak_bytes
                    _give(running, answer)
                    running.clear()
                    self._send_next(connection, running)

    def _send_next(self, connection: AuthenticatedConnection, running: list[_Order]) -> None:
        """Sends the next job, and waits until there is one. Ranks that end meanwhile are noticed."""
        while True:
            with self._came:
                if self._orders:
                    running += take_together(self._orders, self.pass_tokens)  # before it is sent, which may fail
                    break
                self._came.wait(WAIT_SECONDS)
            if connection.poll():
                message = connection.recv()  # raises EOFError if they have ended
                if isinstance(message, StopAsked):
                    self.on_stop()
        job = joined([order.job for order in running])
        self.num_joint += isinstance(job, Together)
        connection.send(job)


WAIT_SECONDS = 0.05


def _give(orders: list[_Order], answer: Any) -> None:
    """Gives each job its part of the answer."""
    of_jobs = [answer] * len(orders) if isinstance(answer, Refused) else answers_of([o.job for o in orders], answer)
    for order, one in zip(orders, of_jobs, strict=True):
        order.settle(RefusedError(one.text) if isinstance(one, Refused) else one)
