"""Connections between the program and the ranks that lead its generators."""

import secrets
import threading
from multiprocessing import AuthenticationError

from automodel_rl.errors import InputError, RolloutError, innermost
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.door import LONGEST_WAIT, Door, DoorAddress


class Meeting:
    """Listener for the connections of ranks, in a thread. `host` is this machine's name for them."""

    def __init__(self, host: str):
        self._come: dict[int, AuthenticatedConnection] = {}
        self._news = threading.Condition()
        self._door = Door(host, 0, secrets.token_bytes(32), self._greet)
        self.address = self._door.address

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()

    def connection(self, rank: int) -> AuthenticatedConnection:
        """Waits for the connection of a rank. Raises RolloutError if it does not connect."""
        with self._news:
            if not self._news.wait_for(lambda: rank in self._come, LONGEST_WAIT):
                raise RolloutError(f"rank {rank} could not reach the program at {self.address.host}")
            return self._come[rank]

    def _greet(self, connection: AuthenticatedConnection) -> None:
        try:
            rank = connection.recv()
        except (OSError, EOFError):
            connection.close()
            return
        with self._news:
            self._come[rank] = connection
            self._news.notify_all()


def meet(address: DoorAddress, rank: int) -> AuthenticatedConnection:
    """Connects this rank to the program. Raises InputError if it cannot be reached."""
    try:
        connection = address.knock()
        connection.send(rank)
    except (AuthenticationError, OSError, EOFError) as error:
        raise InputError(
            f"rank {rank} has a generator but cannot reach the program at {address.host}:{address.port} "
            f"({innermost(error)}): allow ranks to connect to any port of that machine"
        ) from None
    return connection
