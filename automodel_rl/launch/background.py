"""Work in a thread of its own, which ends with the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Starts work in a thread. An executor's threads would keep the process from ending.

    Args:
        work: the function to call.
        name: the thread's name.

    Returns:
        What the function returns or raises.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return result
