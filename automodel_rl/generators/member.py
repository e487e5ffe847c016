"""A member of a fleet: the program's end of the connection to one generator."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from automodel_rl.errors import innermost
from automodel_rl.generator_messages import Failed, Finished, Generate, Request, UseVersion
from automodel_rl.generators.joining_messages import HasEnded, IsReading, Leaving, MessageConnection
from automodel_rl.launch.authenticated import AuthenticatedConnection

IS_GONE = "its process has exited"
"""Reason for the loss of a member whose connection has ended."""

LONGEST_READING = 3600.0
"""Longest time in seconds for which a member counts as alive because it reports that it is reading weights."""

LONGEST_FAREWELL = 5.0
"""Longest wait in seconds for the message that the run has ended to be sent."""


class Member:
    """The program's end of a connection to a rank that leads a generator, or to a joined generator.

    One thread sends and one receives, so that a generator that does not read blocks nobody and completions are handled
    as they arrive.

    Args:
        number: number in the fleet; the rank, if one leads it.
        works_alone: whether the generator writes in the background. If not, it writes during a remote call.
        take: called with each message, and with `Failed(0, ...)` once the connection has ended. If it raises, the
            member is lost.
        has_joined: whether it joined from outside the job, and may leave at any time.

    Attributes:
        problem: why it is lost; "" while it is not.
        broke_off: whether its connection has ended.
        queued: requests that wait for the next remote call, if it does not work alone.
        heard: monotonic time of its last requested completion or report that it is reading weights.
        first_number: first request number of the current generator. Lower ones went to generators before a restart.
        num_given_up: consecutive failed restarts.
        tried_again_at: policy version at which the next restart is tried.
    """

    def __init__(
        self,
        number: int,
        works_alone: bool,
        connection: AuthenticatedConnection | MessageConnection,
        take: Callable[["Member", Finished | Failed | Leaving | IsReading], None],
        has_joined: bool = False,
    ):
        self.number, self.works_alone, self.has_joined = number, works_alone, has_joined
        self.problem, self.broke_off = "", False
        self.queued: list[Generate] = []
        self.heard = self._told_to_read = time.monotonic()
        self.first_number = self.num_given_up = self.tried_again_at = 0
        self._connection, self._take = connection, take
        self._outgoing: queue.SimpleQueue[Generate | UseVersion | HasEnded | None] = queue.SimpleQueue()
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
        self._told_to_read = time.monotonic()
        self._outgoing.put(version)

    def note_completion(self) -> None:
        """Records a requested completion as a sign of life."""
        self.heard = time.monotonic()

    def note_reading(self) -> None:
        """Records a report that it is reading weights as a sign of life, for at most `LONGEST_READING`."""
        now = time.monotonic()
        if now - self._told_to_read < LONGEST_READING:
            self.heard = now

    def ask(self, number: int, requests: Sequence[Request]) -> None:
        """Sends or queues requests; `number` is repeated in the answers. Connection errors go to `take`."""
        asked = Generate(number, [*requests])
        if self.works_alone:
            self._outgoing.put(asked)
        else:
            self.queued.append(asked)

    def take_queued(self) -> list[Generate]:
        """Removes and returns the queued requests."""
        queued, self.queued = self.queued, []
        return queued

    def give_up(self, version: int) -> None:
        """Postpones the next restart by 1, 2, 4, ... policy versions from `version`, the current one."""
        self.tried_again_at = version + 2**self.num_given_up
        self.num_given_up += 1

    def close(self) -> None:
        """Closes the connection."""
        self._connection.hang_up()

    def dismiss(self) -> None:
        """Closes the connection at the end of the run, after notifying a joined generator."""
        if self.has_joined:
            self._outgoing.put(HasEnded())
            self._sender.join(LONGEST_FAREWELL)
        self.close()

    def _send(self) -> None:
        asked: Generate | UseVersion | HasEnded | None = None
        while not isinstance(asked, HasEnded) and (asked := self._outgoing.get()) is not None:
            try:
                self._connection.send(asked)
            except OSError:
                return  # the reader sees it, too
            except Exception as error:  # not picklable, or media that are too large
                number = asked.number if isinstance(asked, Generate) else 0
                self._take(self, Failed(number, innermost(error)))

    def _read(self) -> None:
        problem = IS_GONE
        try:
            while True:
                message: Any = self._connection.recv()
                self._take(self, message)
        except (EOFError, OSError):  # its rank has ended, or the program
            pass
        except Exception as error:  # unreadable or rejected by `take`
            problem = innermost(error)
        finally:
            self.broke_off = True
            self._connection.close()
            self._outgoing.put(None)
            self._take(self, Failed(0, problem))


def name_of(number: int | None, *, has_joined: bool) -> str:
    """Returns a member's name for messages; `number` is None for generators outside a fleet."""
    if number is None:
        return "generators"
    return f"joined generator {number}" if has_joined else f"generator of rank {number}"
