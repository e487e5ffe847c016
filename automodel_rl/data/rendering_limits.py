"""Limits on what a chat template may take: time and memory to write one chat. A template is a program that comes with a
checkpoint, and one that loops or grows would otherwise hang a run before its first line."""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from automodel_rl.errors import InputError

MOST_SECONDS = 20
"""Most processor time to write one chat. Real templates take milliseconds. The time on the clock does not count: a
machine may be loaded or suspended."""

MOST_BYTES = 2**30
"""Most memory that writing one chat may add."""

MOST_CHARACTERS = 50_000_000
"""Longest text of one chat."""


class _OutOfTime(BaseException):
    """Raised in the template's own code. It is no Exception, which those who render take for a refusal."""


@contextlib.contextmanager
def rendering_limits(where: str) -> Iterator[None]:
    """Ends the block with an error if it takes too long, and lets what asks for too much memory fail.

    The limit of time holds in a process's main thread, where Python handles signals. Processes that use a GPU must not
    limit their memory: the block belongs before ranks start.

    Args:
        where: what is written, for error messages.

    Raises:
        InputError: the block took too long.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + MOST_BYTES
    keeps_time = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGPROF, _out_of_time) if keeps_time else None
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    if keeps_time:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    except _OutOfTime:
        raise InputError(
            f"{where}: the chat template did not write it within {MOST_SECONDS} seconds of processor time: give "
            "data.chat_template one that ends"
        ) from None
    finally:
        if keeps_time:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check_length(text: str | None, where: str) -> None:
    """Raises InputError if a template has written more of a chat than any model reads."""
    if text is not None and len(text) > MOST_CHARACTERS:
        raise InputError(
            f"{where}: the chat template writes {len(text):,} characters, more than {MOST_CHARACTERS:,}: give "
            "data.chat_template one that writes the chat"
        )


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def _address_space() -> int:
    """Bytes of memory that this process has mapped. Where /proc does not tell, none: then the limit is not set."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.getrlimit(resource.RLIMIT_AS)[1]
