"""A member of a fleet: one generator, as a program sees it."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from automodel_rl.errors import innermost
from automodel_rl.generator_messages import Failed, Finished, Generate, Request, UseVersion
from automodel_rl.generators.joining_messages import HasEnded, IsReading, Leaving, MessageConnection
from automodel_rl.launch.authenticated import AuthenticatedConnection

IS_GONE = "its process is gone"
"""Why a member is lost whose connection has ended."""

LONGEST_READING = 3600.0
"""Longest time in seconds for which a member counts as alive because it says that it reads a version of the weights."""

LONGEST_FAREWELL = 5.0
"""Longest wait in seconds until a member has been told that the run has ended."""


class Member:
    """The program's end of a connection to a rank that leads a generator, or to a generator that has joined.

    Two threads send and receive. So nobody waits for a generator that does not read, and its completions are taken as
    they come.

    Args:
        number: its number in the fleet: the rank, if one leads it.
        works_alone: whether the generator writes while its rank does something else. If not, it writes during a remote
            call.
        connection: the connection to it.
        take: gets what it sends, and a `Failed` with the number 0 if nothing more will come. If it raises an error, the
            member is lost: it has sent what it should not.
        has_joined: whether it has come by itself, and can leave at any time.

    Attributes:
        problem: why it is lost, "" if it is not.
        broke_off: whether its connection ended without a reason, or for what it sent.
        queued: requests not sent yet: they wait for the next `write`.
        heard: time at which it last sent a completion that it was asked for, or was reading weights, by the monotonic
            clock.
        first_number: the first number of what its generator was asked. Earlier requests went to generators before it.
        num_given_up: how often it did not come back, in a row.
        tried_again_at: the policy version from which on another start is tried.
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
        """Its name in messages."""
        return name_of(self.number, has_joined=self.has_joined)

    def use(self, version: UseVersion) -> None:
        """Lets it write what it is asked for from now on with a version of published weights.

        Args:
            version: the version.
        """
        self._told_to_read = time.monotonic()
        self._outgoing.put(version)

    def note_completion(self) -> None:
        """Notes that it has sent a completion that it was asked for."""
        self.heard = time.monotonic()

    def note_reading(self) -> None:
        """Notes that it reads weights, as long as that may take."""
        now = time.monotonic()
        if now - self._told_to_read < LONGEST_READING:
            self.heard = now

    def ask(self, number: int, requests: Sequence[Request]) -> None:
        """Gives it requests. If it is gone, `take` learns of it.

        Args:
            number: a number that its answers have.
            requests: the completions to write.
        """
        asked = Generate(number, [*requests])
        if self.works_alone:
            self._outgoing.put(asked)
        else:
            self.queued.append(asked)

    def take_queued(self) -> list[Generate]:
        """The requests that wait, which now wait no more."""
        queued, self.queued = self.queued, []
        return queued

    def give_up(self, version: int) -> None:
        """Notes that it did not come back: other starts are tried after 1, 2, 4 ... further policy versions.

        Args:
            version: the policy version now.
        """
        self.tried_again_at = version + 2**self.num_given_up
        self.num_given_up += 1

    def close(self) -> None:
        """Gives it no more requests."""
        self._connection.hang_up()

    def dismiss(self) -> None:
        """Gives it no more requests, for the run has ended, and says so if it has come by itself."""
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
                return  # the other thread learns of it, too
            except Exception as error:  # what cannot be pickled, such as bytes of a picture that are too many
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
        except Exception as error:  # it has sent what it should not
            problem = innermost(error)
        finally:
            self.broke_off = True
            self._connection.close()
            self._outgoing.put(None)
            self._take(self, Failed(0, problem))


def name_of(number: int | None, *, has_joined: bool) -> str:
    """The name of a fleet's member in messages; None for a generator of no fleet."""
    if number is None:
        return "generators"
    return f"joined generator {number}" if has_joined else f"generator of rank {number}"
