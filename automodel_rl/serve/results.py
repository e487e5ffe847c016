"""Results of requests, which clients poll for."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.serve.ranks import RanksLostError, RefusedError
from automodel_rl.serve.tables import BusyError

Result = bytes | dict[str, Any]
"""A protobuf body, or a JSON body."""


def failed(text: str, category: str = "user") -> Result:
    """Returns the result of a failed request. The client raises `text` and does not retry."""
    return {"error": text, "category": category}


def digest_of(kind: str, body: BaseModel | bytes) -> bytes:
    """Hashes a request's kind and content, to tell apart requests with the same number."""
    content = body if isinstance(body, bytes) else body.model_dump_json().encode()
    return hashlib.sha256(kind.encode() + b"\0" + content).digest()


MIN_BYTES = 4096
"""Least memory of a request: its names, its entry and its waiter."""


@dataclass
class _Entry:
    result: asyncio.Future
    digest: bytes
    size: int
    was_received: bool = False
    since: float = field(default_factory=time.monotonic)


class Results:
    """Results by request name. All methods are called in the server's event loop.

    A session may hold at most as many entries, and bytes, as are still free, so that none uses up all the room.
    Results that its client has received are evicted first.

    Args:
        seconds: how long a result is kept.
        most: most entries, finished or not.
        max_bytes: most bytes of all results and of waiting requests.
    """

    def __init__(self, seconds: float, most: int, max_bytes: int):
        self.seconds, self.most, self.max_bytes = seconds, most, max_bytes
        self._entries: dict[str, _Entry] = {}
        self._usage_by_session: dict[str, tuple[int, int]] = {}  # number and bytes of a session's entries

    def repeats(self, request: str, digest: bytes) -> bool:
        """Whether a request is a retry after its answer was lost. Raises InputError if its number belongs to a
        different request."""
        if request not in self._entries:
            return False
        if self._entries[request].digest != digest:
            raise InputError(
                f"{request}: a different request with this number was already accepted: use a new number, or resend "
                "the same request"
            )
        return True

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request: str, digest: bytes, size: int = 0, *, is_early: bool = False) -> asyncio.Future:
        """Reserves the result of a request.

        Args:
            request: its name, which starts with that of its session.
            digest: from `digest_of`.
            size: upper bound on its memory, in bytes.
            is_early: whether its turn is still to come. Early requests leave half of the room to those before them.

        Raises:
            BusyError: too many requests are waiting.
        """
        session, size = request.partition(":")[0], size + MIN_BYTES
        if not self._fits(session, size, is_early):
            self.forget_old()
            self._evict_received(session)
        if not self._fits(session, size, is_early):
            raise BusyError(
                f"{len(self._entries)} requests are waiting or have stored results (limits.waiting, "
                "limits.waiting_gib): try again later"
            )
        entry = _Entry(asyncio.get_running_loop().create_future(), digest, size)
        self._entries[request] = entry
        self._count(session, entry, 1)

        def finished(done: asyncio.Future) -> None:
            if self._entries.get(request) is entry:
                self._count(session, entry, -1)
                told = done.result()
                entry.size = MIN_BYTES + (len(told) if isinstance(told, bytes) else 0)
                self._count(session, entry, 1)

        entry.result.add_done_callback(finished)
        return entry.result

    def _fits(self, session: str, size: int, is_early: bool) -> bool:
        own, own_bytes = self._usage_by_session.get(session, (0, 0))
        share = 2 if is_early else 1
        free = self.most - len(self._entries) - 1
        free_bytes = self.max_bytes - sum(num_bytes for _, num_bytes in self._usage_by_session.values()) - size
        return share * own <= free and share * (own_bytes + size) <= free_bytes

    def _count(self, session: str, entry: _Entry, sign: int) -> None:
        own, own_bytes = self._usage_by_session.pop(session, (0, 0))
        if own + sign:
            self._usage_by_session[session] = (own + sign, own_bytes + sign * entry.size)

    def forget(self, request: str) -> None:
        self._forget(lambda name, _: name == request)

    def _forget(self, is_old: Callable[[str, _Entry], bool]) -> None:
        for request in [name for name, entry in self._entries.items() if is_old(name, entry)]:
            self._count(request.partition(":")[0], self._entries.pop(request), -1)

    def _evict_received(self, session: str) -> None:
        """Evicts the results that a session's client has received."""
        self._forget(lambda name, entry: entry.was_received and name.startswith(f"{session}:"))

    def take_result(self, request: str) -> Result:
        """Returns a finished result and marks it as received by its client."""
        entry = self._entries[request]
        entry.was_received = True
        return entry.result.result()

    def find(self, request: str) -> asyncio.Future:
        """Returns the future of a request's result. Raises InputError if it does not exist or was evicted."""
        if request not in self._entries:
            raise InputError(
                f"unknown request {request!r}: its result is older than limits.result_minutes, or the server was "
                "restarted since"
            )
        return self._entries[request].result

    def forget_old(self) -> None:
        oldest = time.monotonic() - self.seconds
        self._forget(lambda _, entry: entry.since <= oldest and entry.result.done())


async def finish(
    result: asyncio.Future, job: Future, convert: Callable[[Any], Result], lost: Callable[[], str]
) -> None:
    """Waits for a job and sets a request's result.

    Args:
        convert: converts the job's answer to the result.
        lost: returns the error text if the ranks are gone.
    """
    try:
        answer = convert(await asyncio.wrap_future(job))
    except (RefusedError, InputError) as error:
        answer = failed(str(error))
    except RanksLostError:
        answer = failed(lost(), "server")
    except Exception as error:  # the client must not wait forever
        answer = failed(describe_root_cause(error), "server")
    if not result.done():
        result.set_result(answer)
