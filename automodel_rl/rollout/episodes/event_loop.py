"""The process's one event loop for async tools and environments, so that objects opened in one call work in the
next."""

import asyncio
import contextlib
import functools
import inspect
from typing import Any

SECONDS_TO_END = 1.0
"""Time for a cancelled call to end."""


def awaited(found: Any) -> Any:
    if not inspect.isawaitable(found):
        return found
    loop = _loop()
    task = asyncio.ensure_future(found, loop=loop)
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():  # interrupted by a time limit
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(asyncio.wait([task], timeout=SECONDS_TO_END))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
