"""Background work in a daemon thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


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
