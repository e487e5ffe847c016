"""The end of a rank: its exception becomes a record and an exit code, and its peers learn of it."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from automodel_rl.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_OK,
    InputError,
    JobEndedError,
    MicrobatchError,
    innermost,
)
from automodel_rl.launch import watchdog
from automodel_rl.launch.flight import flight
from automodel_rl.launch.lifeline import hold_lifeline
from automodel_rl.launch.record import RECORD_FOLDER_VARIABLE, FailureRecord, leave_record, own_rank, show


def guard(work: Callable[[], object]) -> int:
    """Runs a rank's `work` and returns the exit code. A failure leaves a record; without a launcher it is shown.

    A rank with peers does not return but ends the process itself. Python's own way out would take down the process
    group, and in a failed job that waits for peers, which wait for this rank.
    """
    hold_lifeline()
    watchdog.is_guarded = True
    record = _run(work)
    code = EXIT_OK if record is None else record.exit_code
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if record is None or record.is_everywhere:
            _finish_threads()
        if record is None:
            watchdog.leave()
        else:
            watchdog.report_failure(record)
        _discard_notes(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if record is not None and RECORD_FOLDER_VARIABLE in os.environ:
        leave_record(Path(os.environ[RECORD_FOLDER_VARIABLE]), record)
    elif record is not None:
        show(record)
    _discard_notes(code)
    return code


def _finish_threads() -> None:
    """Waits for threads that write a checkpoint, as any Python process does at its end."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _discard_notes(code: int) -> None:
    if code != EXIT_FAILURE:
        flight.discard()


def _run(work: Callable[[], object]) -> FailureRecord | None:
    try:
        work()
    except InputError as error:
        return FailureRecord(own_rank(), EXIT_BAD_INPUT, f"error: {error}")
    except JobEndedError as error:
        return FailureRecord(own_rank(), EXIT_FAILURE, str(error), is_everywhere=True)
    except KeyboardInterrupt:
        return FailureRecord(own_rank(), EXIT_FAILURE, "interrupted")
    except BaseException as error:  # also SystemExit of a library: peers must learn that this rank is gone
        return FailureRecord(own_rank(), EXIT_FAILURE, f"error: {describe(error)}", traceback.format_exc())
    return None


def describe(error: BaseException) -> str:
    """One line that says what failed, with stage and microbatch if one was running."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MicrobatchError):
            return f"rank {own_rank()}: {chain}"
        chain = chain.__cause__
    return f"rank {own_rank()}: {innermost(error)}"
