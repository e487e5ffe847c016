"""Results of requests, which clients poll for."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from automodel_rl.errors import InputError, innermost
from automodel_rl.serve.ranks import RanksLostError, RefusedError
from automodel_rl.serve.tables import BusyError

Result = bytes | dict[str, Any]
"""A body in protobuf, or one in JSON."""


def failed(text: str, category: str = "user") -> Result:
    """The result of a request that failed; the client raises it with its text and does not try again."""
    return {"error": text, "category": category}


def digest_of(kind: str, body: BaseModel | bytes) -> bytes:
    """What tells requests of the same number apart: their kind and their content."""
    content = body if isinstance(body, bytes) else body.model_dump_json().encode()
    return hashlib.sha256(kind.encode() + b"\0" + content).digest()


LEAST_BYTES = 4096
"""What a request takes at least: its names, its place, and what waits for it."""


@dataclass
class _Entry:
    result: asyncio.Future
    digest: bytes
    size: int
    was_told: bool = False
    since: float = field(default_factory=time.monotonic)


class Results:
    """Results by the numbers of their requests. All methods are called in the server's event loop.

    A session has at most as many, and as many bytes, as are free, so that none takes the room of all. What its client
    has got makes room first.

    Args:
        seconds: how long a result is kept.
        most: most results, finished or not.
        most_bytes: most bytes of all results, and of requests that wait for theirs.
    """

    def __init__(self, seconds: float, most: int, most_bytes: int):
        self.seconds, self.most, self.most_bytes = seconds, most, most_bytes
        self._entries: dict[str, _Entry] = {}
        self._of_session: dict[str, tuple[int, int]] = {}  # how many a session has, and their bytes

    def repeats(self, request: str, digest: bytes) -> bool:
        """Whether a request was sent before, and is sent again because its answer was lost.

        Raises:
            InputError: another was sent under its number.
        """
        if request not in self._entries:
            return False
        if self._entries[request].digest != digest:
            raise InputError(
                f"{request}: another request was sent with this number before, and runs: give this one a number of its "
                "own, or send the same again"
            )
        return True

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request: str, digest: bytes, size: int = 0, *, is_early: bool = False) -> asyncio.Future:
        """A place for the result of a request.

        Args:
            request: the request's name, which begins with that of its session.
            digest: what tells it from others of this name.
            size: the most bytes that it makes.
            is_early: whether its turn is still to come. Such requests leave half of the room to those before them.

        Raises:
            BusyError: too many wait.
        """
        session, size = request.partition(":")[0], size + LEAST_BYTES
        if not self._fits(session, size, is_early):
            self.forget_old()
            self._forget_told(session)
        if not self._fits(session, size, is_early):
            raise BusyError(
                f"{len(self._entries)} requests wait or their results are kept (limits.waiting, limits.waiting_gib): "
                "ask again later"
            )
        entry = _Entry(asyncio.get_running_loop().create_future(), digest, size)
        self._entries[request] = entry
        self._count(session, entry, 1)

        def finished(done: asyncio.Future) -> None:
            if self._entries.get(request) is entry:
                self._count(session, entry, -1)
                told = done.result()
                entry.size = LEAST_BYTES + (len(told) if isinstance(told, bytes) else 0)
                self._count(session, entry, 1)

        entry.result.add_done_callback(finished)
        return entry.result

    def _fits(self, session: str, size: int, is_early: bool) -> bool:
        """Whether a request has room."""
        own, own_bytes = self._of_session.get(session, (0, 0))
        share = 2 if is_early else 1
        free = self.most - len(self._entries) - 1
        free_bytes = self.most_bytes - sum(num_bytes for _, num_bytes in self._of_session.values()) - size
        return share * own <= free and share * (own_bytes + size) <= free_bytes

    def _count(self, session: str, entry: _Entry, sign: int) -> None:
        own, own_bytes = self._of_session.pop(session, (0, 0))
        if own + sign:
            self._of_session[session] = (own + sign, own_bytes + sign * entry.size)

    def forget(self, request: str) -> None:
        """Lets go of a request."""
        self._forget(lambda name, _: name == request)

    def _forget(self, is_old: Callable[[str, _Entry], bool]) -> None:
        for request in [name for name, entry in self._entries.items() if is_old(name, entry)]:
            self._count(request.partition(":")[0], self._entries.pop(request), -1)

    def _forget_told(self, session: str) -> None:
        """Lets go of what the client of a session has got."""
        self._forget(lambda name, entry: entry.was_told and name.startswith(f"{session}:"))

    def tell(self, request: str) -> Result:
        """The result of a request that is done, which its client gets now."""
        entry = self._entries[request]
        entry.was_told = True
        return entry.result.result()

    def find(self, request: str) -> asyncio.Future:
        """The result of a request.

        Raises:
            InputError: there is no such request, or its result was let go.
        """
        if request not in self._entries:
            raise InputError(
                f"there is no request {request!r}: its result is older than limits.result_minutes, or the server was "
                "started again since"
            )
        return self._entries[request].result

    def forget_old(self) -> None:
        """Lets go of results that are older than `seconds`."""
        oldest = time.monotonic() - self.seconds
        self._forget(lambda _, entry: entry.since <= oldest and entry.result.done())


async def finish(
    result: asyncio.Future, job: Future, convert: Callable[[Any], Result], lost: Callable[[], str]
) -> None:
    """Waits for a job and sets a request's result.

    Args:
        result: the result.
        job: the job's answer.
        convert: makes the result of the answer.
        lost: says what became of the run if the ranks are gone.
    """
    try:
        answer = convert(await asyncio.wrap_future(job))
    except (RefusedError, InputError) as error:
        answer = failed(str(error))
    except RanksLostError:
        answer = failed(lost(), "server")
    except Exception as error:  # the client must not wait for ever
        answer = failed(innermost(error), "server")
    if not result.done():
        result.set_result(answer)
