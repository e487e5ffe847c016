"""Admission of connections by a key, which both ends know."""

from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge


def admits(connection: Connection, key: bytes) -> bool:
    """Whether the other end of a connection that was taken knows the key. If it does not, the connection is closed.
    Call it in a thread of its own, for a stranger may say nothing.

    Args:
        connection: the connection.
        key: the key, in place of the `authkey` of a `multiprocessing.connection.Listener`, which waits for a stranger.
    """
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError, ValueError):
        connection.close()
        return False
    return True
