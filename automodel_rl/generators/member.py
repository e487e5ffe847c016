"""A member of a fleet: one generator, as a program sees it."""

import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from automodel_rl.generator_messages import Failed, Finished, Generate, Request
from automodel_rl.generators.meeting import hang_up

RANK_IS_GONE = "its rank is gone"
"""Why a member is lost whose rank has ended."""


class Member:
    """The program's end of a relay.

    Args:
        rank: the rank that leads the generator.
        works_alone: whether the generator writes while its rank does something else. If not, it writes in a job.
        connection: the connection to the relay.
        take: gets what the relay sends, and a `Failed` with the number 0 if nothing more will come.

    Attributes:
        problem: why it is lost, "" if it is not.
        queued: requests that it has not got yet: they wait for a job.
    """

    def __init__(
        self,
        rank: int,
        works_alone: bool,
        connection: Connection,
        take: Callable[["Member", Finished | Failed], None],
    ):
        self.rank, self.works_alone = rank, works_alone
        self.problem = ""
        self.queued: list[Generate] = []
        self._connection, self._take, self._sending = connection, take, threading.Lock()
        threading.Thread(target=self._read, daemon=True, name=f"generator of rank {rank}").start()

    def ask(self, number: int, requests: Sequence[Request]) -> None:
        """Gives it requests. If its rank is gone, `take` learns of it.

        Args:
            number: a number that its answers have.
            requests: the completions to write.
        """
        order = Generate(number, [*requests])
        if not self.works_alone:
            self.queued.append(order)
            return
        try:
            with self._sending:
                self._connection.send(order)
        except OSError:
            self._take(self, Failed(number, RANK_IS_GONE))

    def take_queued(self) -> list[Generate]:
        """The requests that wait, which now wait no more."""
        queued, self.queued = self.queued, []
        return queued

    def close(self) -> None:
        """Gives it no more requests."""
        hang_up(self._connection)

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):  # its rank has ended, or the program
                self._connection.close()
                self._take(self, Failed(0, RANK_IS_GONE))
                return
            self._take(self, message)
