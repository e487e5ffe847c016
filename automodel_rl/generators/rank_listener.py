"""Connections between the program and the ranks that lead its generators."""

import secrets
import threading
from multiprocessing import AuthenticationError

from automodel_rl.errors import InputError, RolloutError, describe_root_cause
from automodel_rl.launch.authenticated import AuthenticatedConnection
from automodel_rl.launch.listener import CONNECT_TIMEOUT, AuthenticatedListener, ListenerAddress


class RankListener:
    """Listener for the connections of ranks, in a thread. `host` is this machine's name for them."""

    def __init__(self, host: str):
        self._connections: dict[int, AuthenticatedConnection] = {}
        self._condition = threading.Condition()
        self._listener = AuthenticatedListener(host, 0, secrets.token_bytes(32), self._on_connection)
        self.address = self._listener.address

    def __enter__(self) -> "RankListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def connection(self, rank: int) -> AuthenticatedConnection:
        """Waits for the connection of a rank. Raises RolloutError if it does not connect."""
        with self._condition:
            if not self._condition.wait_for(lambda: rank in self._connections, CONNECT_TIMEOUT):
                raise RolloutError(f"rank {rank} could not reach the program at {self.address.host}")
            return self._connections[rank]

    def _on_connection(self, connection: AuthenticatedConnection) -> None:
        try:
            rank = connection.recv()
        except (OSError, EOFError):
            connection.close()
            return
        with self._condition:
            self._connections[rank] = connection
            self._condition.notify_all()


def connect_to_program(address: ListenerAddress, rank: int) -> AuthenticatedConnection:
    """Connects this rank to the program. Raises InputError if it cannot be reached."""
    try:
        connection = address.connect()
        connection.send(rank)
    except (AuthenticationError, OSError, EOFError) as error:
        raise InputError(
            f"rank {rank} has a generator but cannot reach the program at {address.host}:{address.port} "
            f"({describe_root_cause(error)}): allow ranks to connect to any port of that machine"
        ) from None
    return connection
