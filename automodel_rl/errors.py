"""Errors that users can act on, and the exit codes of the command line."""

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
"""Folders whose code is not the user's own."""


class InputError(ValueError):
    """Invalid user input. The message is one line: the given value, the rule, and the remedy.

    Example:
        >>> load_config("nowhere.yaml")
        Traceback (most recent call last):
        automodel_rl.errors.InputError: nowhere.yaml: cannot read the config file (No such file or directory)
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # parts of it may come from libraries, with line breaks


class MicrobatchError(RuntimeError):
    """A failed forward, loss or backward, with the original error as its `__cause__`.

    The message names the place, what failed, and the line of the user's code that raised the error.

    Attributes:
        place: phase, microbatch and stage, such as "loss of microbatch 0 on stage 0".

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
    """A failure of the step on this rank because a forward, loss or backward failed on another."""

    def __init__(self, rank: int, place: str, message: str):
        RuntimeError.__init__(self, f"another rank failed, rank {rank}: {message}")
        self.place = place


class JobEndedError(RuntimeError):
    """End of the job. The message is complete, so no traceback is shown."""


class StoppedError(JobEndedError):
    """Requested stop of the run, which can resume from its newest checkpoint."""


class VerificationError(JobEndedError):
    """A layout whose results differ from those of one process."""


class DoesNotFitError(RuntimeError):
    """A layout that needs more memory than the device has."""


class TrainingDivergedError(JobEndedError):
    """Too many consecutive steps with a non-finite loss or gradient."""


class RolloutError(JobEndedError):
    """Failed generation, or completions without anything to learn from."""


class WeightSyncError(RuntimeError):
    """Failed transfer of new weights to a generator, which does not generate until it has them."""


def describe_root_cause(error: BaseException) -> str:
    """Formats the first error of a chain as `Type: message` on one line."""
    error = root_cause(error)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"


def root_cause(error: BaseException) -> BaseException:
    """Returns the error at the start of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def line_of_caller(error: BaseException) -> str:
    """Returns the line of the user's code that raised the first error of a chain, as ` (file:line in function)`.

    Empty if only the package and libraries were involved.
    """
    frames = traceback.extract_tb(root_cause(error).__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in LIBRARIES)]
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""


def reason(error: Exception) -> str:
    """Returns why a weight sync failed: a `WeightSyncError`'s message, or the type and message of any other error."""
    return str(error) if isinstance(error, WeightSyncError) else describe_root_cause(error)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelled one probably means; None if none is close."""
    names = list(known)
    swapped = next((other for other in names if sorted(other) == sorted(name)), None)
    return swapped or next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)
