"""Errors that a user can act on, and exit codes of the command line."""

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
"""Folders of code that is not the user's own."""


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: the given value, the rule, and the remedy.

    Example:
        >>> load_config("nowhere.yaml")
        Traceback (most recent call last):
        automodel_rl.errors.InputError: nowhere.yaml: cannot read the config file (No such file or directory)
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # parts of it may come from libraries


class MicrobatchError(RuntimeError):
    """A forward, loss or backward failed. The error that it raised is the `__cause__`. The message names the place, the
    cause, and the line of the caller's own code that raised it.

    Attributes:
        place: the phase, the microbatch and the stage, e.g. "loss of microbatch 0 on stage 0".

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
    """The job ends. The message says everything the user needs, so no traceback is shown."""


class StoppedError(JobEndedError):
    """The run was asked to stop, and goes on from its newest checkpoint."""


class VerificationError(JobEndedError):
    """A layout does not compute the same numbers as one process."""


class DoesNotFitError(RuntimeError):
    """A layout needs more memory than the device has."""


class TrainingDivergedError(JobEndedError):
    """Too many steps in a row had a loss or a gradient that is not finite."""


class RolloutError(JobEndedError):
    """Completions could not be generated, or there is nothing to learn from them."""


class WeightSyncError(RuntimeError):
    """A generator did not get the new weights. It does not generate until it has them."""


def innermost(error: BaseException) -> str:
    """The error that started a chain, as `Type: message` on one line."""
    error = first_in_chain(error)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"


def first_in_chain(error: BaseException) -> BaseException:
    """The error that started a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def line_of_caller(error: BaseException) -> str:
    """The line of the user's own code that raised the error that started a chain, as ` (file:line in function)`.

    It is empty if only the package and libraries were involved.
    """
    frames = traceback.extract_tb(first_in_chain(error).__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""


def reason(error: Exception) -> str:
    """Why a weight sync failed: the message of a `WeightSyncError`, or the type and message of any other error."""
    return str(error) if isinstance(error, WeightSyncError) else innermost(error)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means; None if none is near."""
    names = list(known)
    swapped = next((other for other in names if sorted(other) == sorted(name)), None)
    return swapped or next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)
