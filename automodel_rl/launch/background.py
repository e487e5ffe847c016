"""Background work in a daemon thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Calls `work` in a daemon thread. An executor is not used, as its threads keep the process from exiting."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return result
