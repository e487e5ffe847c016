"""The event loop of this process, on which async methods of environments and async tools run: one, so that what they
open in one call works in the next."""

import asyncio
import contextlib
import functools
import inspect
from typing import Any

SECONDS_TO_END = 1.0
"""Most seconds that a call gets to end once it was cancelled."""


def awaited(found: Any) -> Any:
    """What a function returned; if that is awaitable, what it comes to.

    Args:
        found: what the function returned.
    """
    if not inspect.isawaitable(found):
        return found
    loop = _loop()
    task = asyncio.ensure_future(found, loop=loop)
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():  # a time limit came between
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(asyncio.wait([task], timeout=SECONDS_TO_END))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
