"""Work in a thread of its own, which ends with the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


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


def then(future: "Future[T]", use: Callable[[T], U]) -> "Future[U]":
    """Returns what a function makes of a future's result, called in the thread that completes the future."""
    result: Future[U] = Future()

    def run(done: "Future[T]") -> None:
        try:
            result.set_result(use(done.result()))
        except BaseException as error:
            result.set_exception(error)

    future.add_done_callback(run)
    return result
