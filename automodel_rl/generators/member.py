"""A member of a fleet: the program's end of the connection to one generator."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from automodel_rl.errors import describe_root_cause
from automodel_rl.generator_messages import Finished, Generate, GenerateFailed, Request, UseVersion
from automodel_rl.generators.joining_messages import Leaving, MessageConnection, ReadingWeights, RunEnded
from automodel_rl.launch.authenticated import AuthenticatedConnection

PROCESS_EXITED = "its process has exited"
"""Reason for the loss of a member whose connection has ended."""

MAX_READING_SECONDS = 3600.0
"""Longest time in seconds for which a member counts as alive because it reports that it is reading weights."""

MAX_DISMISS_SECONDS = 5.0
"""Longest wait in seconds for the message that the run has ended to be sent."""


class Member:
    """The program's end of a connection to a rank that leads a generator, or to a joined generator.

    One thread sends and one receives, so that a generator that does not read blocks nobody and completions are handled
    as they arrive.

    Args:
        number: number in the fleet; the rank, if one leads it.
        writes_in_background: whether the generator writes in the background. If not, it writes during a remote call.
        on_message: called with each message, and with `GenerateFailed(0, ...)` once the connection has ended. If it
            raises, the member is lost.
        has_joined: whether it joined from outside the job, and may leave at any time.

    Attributes:
        problem: why it is lost; "" while it is not.
        is_disconnected: whether its connection has ended.
        queued: requests that wait for the next remote call, if it does not work alone.
        last_heard: monotonic time of its last requested completion or report that it is reading weights.
        first_number: first request number of the current generator. Lower ones went to generators before a restart.
        num_failed_restarts: consecutive failed restarts.
        next_restart_version: policy version at which the next restart is tried.
    """

    def __init__(
        self,
        number: int,
        writes_in_background: bool,
        connection: AuthenticatedConnection | MessageConnection,
        on_message: Callable[["Member", Finished | GenerateFailed | Leaving | ReadingWeights], None],
        has_joined: bool = False,
    ):
        self.number, self.writes_in_background, self.has_joined = number, writes_in_background, has_joined
        self.problem, self.is_disconnected = "", False
        self.queued: list[Generate] = []
        self.last_heard = self._version_sent_at = time.monotonic()
        self.first_number = self.num_failed_restarts = self.next_restart_version = 0
        self._connection, self._on_message = connection, on_message
        self._outgoing: queue.SimpleQueue[Generate | UseVersion | RunEnded | None] = queue.SimpleQueue()
        self._sender, reader = (
            threading.Thread(target=work, daemon=True, name=self.name) for work in (self._send, self._read)
        )
        self._sender.start()
        reader.start()

    @property
    def name(self) -> str:
        """Name for messages."""
        return name_of(self.number, has_joined=self.has_joined)

    def use(self, version: UseVersion) -> None:
        """Switches a joined generator to a published version for all later requests."""
        self._version_sent_at = time.monotonic()
        self._outgoing.put(version)

    def record_completion(self) -> None:
        """Records a requested completion as a sign of life."""
        self.last_heard = time.monotonic()

    def record_reading(self) -> None:
        """Records a report that it is reading weights as a sign of life, for at most `MAX_READING_SECONDS`."""
        now = time.monotonic()
        if now - self._version_sent_at < MAX_READING_SECONDS:
            self.last_heard = now

    def send_requests(self, number: int, requests: Sequence[Request]) -> None:
        """Sends or queues requests; `number` is repeated in the answers. Connection errors go to `on_message`."""
        asked = Generate(number, [*requests])
        if self.writes_in_background:
            self._outgoing.put(asked)
        else:
            self.queued.append(asked)

    def take_queued(self) -> list[Generate]:
        """Removes and returns the queued requests."""
        queued, self.queued = self.queued, []
        return queued

    def postpone_restart(self, version: int) -> None:
        """Postpones the next restart by 1, 2, 4, ... policy versions from `version`, the current one."""
        self.next_restart_version = version + 2**self.num_failed_restarts
        self.num_failed_restarts += 1

    def close(self) -> None:
        """Closes the connection."""
        self._connection.shutdown()

    def dismiss(self) -> None:
        """Closes the connection at the end of the run, after notifying a joined generator."""
        if self.has_joined:
            self._outgoing.put(RunEnded())
            self._sender.join(MAX_DISMISS_SECONDS)
        self.close()

    def _send(self) -> None:
        asked: Generate | UseVersion | RunEnded | None = None
        while not isinstance(asked, RunEnded) and (asked := self._outgoing.get()) is not None:
            try:
                self._connection.send(asked)
            except OSError:
                return  # the reader sees it, too
            except Exception as error:  # not picklable, or media that are too large
                number = asked.number if isinstance(asked, Generate) else 0
                self._on_message(self, GenerateFailed(number, describe_root_cause(error)))

    def _read(self) -> None:
        problem = PROCESS_EXITED
        try:
            while True:
                message: Any = self._connection.recv()
                self._on_message(self, message)
        except (EOFError, OSError):  # its rank has ended, or the program
            pass
        except Exception as error:  # unreadable or rejected by `on_message`
            problem = describe_root_cause(error)
        finally:
            self.is_disconnected = True
            self._connection.close()
            self._outgoing.put(None)
            self._on_message(self, GenerateFailed(0, problem))


def name_of(number: int | None, *, has_joined: bool) -> str:
    """Returns a member's name for messages; `number` is None for generators outside a fleet."""
    if number is None:
        return "generators"
    return f"joined generator {number}" if has_joined else f"generator of rank {number}"
