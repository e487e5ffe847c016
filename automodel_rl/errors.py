"""Errors that a user can act on, and the exit codes they end in."""

import sysconfig
import traceback
from pathlib import Path

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
"""Where code is that a user has not written."""


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: what was given, the rule, the remedy.

    Example:
        >>> load_config("nowhere.yaml")
        Traceback (most recent call last):
        automodel_rl.errors.InputError: nowhere.yaml: cannot read the config file (No such file or directory)
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # parts of it may come from libraries


class MicrobatchError(RuntimeError):
    """A forward, loss or backward failed. What it raised is chained as `__cause__`; the message names the place, the
    cause, and the line of the caller's own code that raised it.

    Attributes:
        place: phase of the work, microbatch and stage.

    Example:
        >>> import torch
        >>> def broken(outputs, microbatch):
        ...     raise KeyError("advantages")
        >>> microbatches = pack([TokenSequence(torch.tensor([5, 6]), torch.tensor([False, True]))], capacity=8)
        >>> try:
        ...     _ = Engine(ModelHandle.from_pretrained(checkpoint)).train_step(microbatches, broken)
        ... except MicrobatchError as error:
        ...     print(error.place, repr(error.__cause__))
        loss of microbatch 0 on stage 0 KeyError('advantages')
    """

    def __init__(self, place: str, what: str):
        super().__init__(f"{place} failed: {what}")
        self.place = place


class PeerError(MicrobatchError):
    """A forward, loss or backward failed on another rank, and so the step failed on this one."""

    def __init__(self, rank: int, place: str, message: str):
        RuntimeError.__init__(self, f"another rank failed, rank {rank}: {message}")
        self.place = place


class JobEndedError(RuntimeError):
    """The job ends, and its message says all that the user needs: no traceback is shown."""


class StoppedError(JobEndedError):
    """The run was asked to stop and has saved a checkpoint."""


class VerificationError(JobEndedError):
    """A layout does not compute the numbers of one process."""


class DoesNotFitError(RuntimeError):
    """A layout needs more memory than the device has."""


class TrainingDivergedError(JobEndedError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class RolloutError(JobEndedError):
    """Completions could not be generated, or teach nothing."""


class WeightSyncError(RuntimeError):
    """A generator did not get the new weights; until it does, it does not generate."""


def innermost(error: BaseException) -> str:
    """`Type: message` of the error that started a chain, its message on one line."""
    error = first_in_chain(error)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"


def first_in_chain(error: BaseException) -> BaseException:
    """The error that started a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def line_of_caller(error: BaseException) -> str:
    """Where code that is neither this package's nor a library's raised the error that started a chain: ` (file:line in
    function)`, or nothing."""
    frames = traceback.extract_tb(first_in_chain(error).__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""


def reason(error: Exception) -> str:
    """Why a weight sync failed: an error that is written for it speaks for itself, any other is named."""
    return str(error) if isinstance(error, WeightSyncError) else innermost(error)
