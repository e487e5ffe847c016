"""Errors that a user can act on, and the exit codes they end in."""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2


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
    """A forward, loss or backward failed; says on which stage and for which microbatch. The cause is chained."""

    def __init__(self, phase: str, stage: int, microbatch: int, cause: BaseException):
        super().__init__(f"{phase} of microbatch {microbatch} on stage {stage} failed: {innermost(cause)}")


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
    """The weights of a rollout engine could not be brought up to date; until they are, it does not generate."""


def innermost(error: BaseException) -> str:
    """`Type: message` of the error that started a chain, its message on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"


def reason(error: Exception) -> str:
    """Why a sync failed: an error that is written for it speaks for itself, any other is named."""
    return str(error) if isinstance(error, WeightSyncError) else innermost(error)
