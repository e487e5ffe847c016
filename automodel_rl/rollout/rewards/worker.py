"""The process that runs a reward function, so that a function that never returns can be ended.

python -m automodel_rl.rollout.rewards.worker FUNCTION DESCRIPTOR

Everything goes over the connection with that file descriptor. The process first receives the options and sends
(None, error). Then it receives (completion, example) and sends (score, error), again and again.
"""

import ctypes
import inspect
import math
import numbers
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.rollout.rewards.functions import find_reward
from automodel_rl.rollout.rewards.options import check_options

PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":  # a reward that never returns must not outlive the job
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[2]))
    name = sys.argv[1]
    try:
        options = connection.recv()
        function = find_reward(name)
        check_options(name, function, options)
    except InputError as error:
        connection.send((None, str(error)))
        return
    connection.send((None, ""))
    while True:
        try:
            completion, example = connection.recv()
        except EOFError:
            return
        connection.send(score(function, completion, example, options))


def score(
    function: Callable[..., Any], completion: str, example: dict[str, Any], options: dict[str, Any]
) -> tuple[float | None, str]:
    """The score and an error text: (score, "") or (None, error)."""
    try:
        value = function(completion, example, **options)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None, f"{text}{_place(function, error)}"
    number = _number(value)
    return (None, f"returned {value!r:.80}, which is no finite number") if number is None else (number, "")


def _number(value: Any) -> float | None:
    """A finite number as a float, else None. NumPy's and torch's scalars count, too, without importing these."""
    try:
        number = float(value if isinstance(value, numbers.Real) else value.item())
    except Exception:  # not a number: no `item`, several items, or an item that is not a number
        return None
    return number if math.isfinite(number) else None


def _place(function: Callable[..., Any], error: Exception) -> str:
    """The place of an error: the innermost frame in the function's own file, since that is the user's code."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    try:
        file = inspect.getfile(inspect.unwrap(function))
    except TypeError:  # the function is written in C
        file = ""
    own = [frame for frame in frames if frame.filename == file] or frames
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


if __name__ == "__main__":
    main()
