"""Limits on time and memory for rendering a chat. A template is a program from the checkpoint, and one that loops or
grows would otherwise hang a run before its first output."""

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from automodel_rl.errors import InputError

MAX_SECONDS = 20
"""Maximum processor seconds for rendering one chat; real templates take milliseconds. Not wall-clock time, since a
machine may be loaded or suspended."""

MAX_BYTES = 2**30
"""Maximum additional memory for rendering one chat."""

MAX_CHARACTERS = 50_000_000
"""Maximum characters of a rendered chat."""


class _OutOfTime(BaseException):
    """Raised inside the template's code. Not an Exception, which callers would treat as a refusal by the template."""


@contextlib.contextmanager
def rendering_limits(where: str) -> Iterator[None]:
    """Raises InputError if the block takes too long, and lets excessive memory allocations in it fail.

    The time limit works only in a process's main thread, where Python handles signals. Processes that use a GPU must
    not limit their memory, so use this before ranks start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + MAX_BYTES
    keeps_time = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGPROF, _out_of_time) if keeps_time else None
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    if keeps_time:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    except _OutOfTime:
        raise InputError(
            f"{where}: the chat template did not write it within {MAX_SECONDS} seconds of processor time: set "
            "data.chat_template to one that terminates"
        ) from None
    finally:
        if keeps_time:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check_length(text: str | None, where: str) -> None:
    """Raises InputError if a rendered chat is longer than any model can read."""
    if text is not None and len(text) > MAX_CHARACTERS:
        raise InputError(
            f"{where}: the chat template writes {len(text):,} characters, more than {MAX_CHARACTERS:,}: set "
            "data.chat_template to one that writes the chat"
        )


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def _address_space() -> int:
    """Returns the bytes of memory mapped by this process. Without /proc, returns the hard limit, so that no limit takes
    effect."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.getrlimit(resource.RLIMIT_AS)[1]
