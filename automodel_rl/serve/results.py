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

Result = bytes | dict[str, Any]
"""A body in protobuf, or one in JSON."""


def failed(text: str, category: str = "user") -> Result:
    """The result of a request that failed; the client raises it with its text and does not try again."""
    return {"error": text, "category": category}


def digest_of(kind: str, body: BaseModel | bytes) -> bytes:
    """What tells requests of the same number apart: their kind and their content."""
    content = body if isinstance(body, bytes) else body.model_dump_json().encode()
    return hashlib.sha256(kind.encode() + b"\0" + content).digest()


@dataclass
class _Entry:
    result: asyncio.Future
    digest: bytes
    since: float = field(default_factory=time.monotonic)


class Results:
    """Results by the numbers of their requests. All methods are called in the server's event loop.

    Args:
        seconds: how long a result is kept.
        most: most results, finished or not.
    """

    def __init__(self, seconds: float, most: int):
        self.seconds, self.most = seconds, most
        self._entries: dict[str, _Entry] = {}

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

    def open(self, request: str, digest: bytes) -> asyncio.Future:
        """A place for the result of a request.

        Raises:
            InputError: there are too many.
        """
        if len(self._entries) >= self.most:
            self.forget_old()
        entry = _Entry(asyncio.get_running_loop().create_future(), digest)
        self._entries[request] = entry
        return entry.result

    @property
    def are_full(self) -> bool:
        """Whether there are as many results as may be."""
        return len(self._entries) >= self.most

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
        self._entries = {k: e for k, e in self._entries.items() if e.since > oldest or not e.result.done()}


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
