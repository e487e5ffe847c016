"""Turns a rank's exception into a record and an exit code, and reports it to its peers."""

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
    describe_root_cause,
)
from automodel_rl.launch import watchdog
from automodel_rl.launch.flight import flight
from automodel_rl.launch.lifeline import hold_lifeline
from automodel_rl.launch.record import RECORD_FOLDER_VARIABLE, FailureRecord, leave_record, own_rank, show


def guard(work: Callable[[], object]) -> int:
    """Runs a rank's `work` and returns the exit code. A failure leaves a record, or is printed if there is no
    launcher.

    A rank with peers ends the process instead of returning: Python's normal exit would tear down the process group,
    which in a failed job waits for peers that wait for this rank.
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
    except BaseException as error:  # also a library's SystemExit: peers must learn that this rank is gone
        return FailureRecord(own_rank(), EXIT_FAILURE, f"error: {describe(error)}", traceback.format_exc())
    return None


def describe(error: BaseException) -> str:
    """Returns one line that says what failed, with the phase and microbatch if one was running."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MicrobatchError):
            return f"rank {own_rank()}: {chain}"
        chain = chain.__cause__
    return f"rank {own_rank()}: {describe_root_cause(error)}"
