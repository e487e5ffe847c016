"""Reads what a process sends over a `multiprocessing` connection, as it comes, without waiting for the rest."""

import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any

MOST_BYTES = 2**20
"""Most bytes of a message."""

CHUNK_BYTES = 2**16


class FrameReader:
    """Reads messages in an event loop, which must not wait for a process that has sent half of one.

    Args:
        connection: the connection.
    """

    def __init__(self, connection: Connection):
        self._connection, self._data = connection, bytearray()

    def take(self) -> list[Any]:
        """The messages that are whole by now. Called when there is something to read.

        Raises:
            EOFError: the other end is closed.
            OSError: it is broken, or a message is too large.
        """
        data = os.read(self._connection.fileno(), CHUNK_BYTES)
        if not data:
            raise EOFError
        self._data += data
        found = []
        while len(self._data) >= 4:
            (size,) = struct.unpack("!i", self._data[:4])
            if not 0 <= size <= MOST_BYTES:
                raise OSError(f"a message of more than {MOST_BYTES} bytes")
            if len(self._data) < 4 + size:
                break
            found.append(pickle.loads(bytes(self._data[4 : 4 + size])))
            del self._data[: 4 + size]
        return found
