"""The process that runs a reward function, so that one that never returns can be ended.

python -m automodel_rl.rollout.rewards.worker FUNCTION DESCRIPTOR

(completion, example, options) in, (score, error) out, over the connection of that descriptor.
"""

import ctypes
import math
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.rollout.rewards.functions import find_reward

PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":  # a reward that never returns must not outlive the job
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[2]))
    try:
        function = find_reward(sys.argv[1])
    except InputError as error:
        connection.send((None, str(error)))
        return
    connection.send((None, ""))
    while True:
        try:
            completion, example, options = connection.recv()
        except EOFError:
            return
        connection.send(score(function, completion, example, options))


def score(
    function: Callable[..., Any], completion: str, example: dict[str, Any], options: dict[str, Any]
) -> tuple[float | None, str]:
    """Score and error; there is one or the other."""
    try:
        value = function(completion, example, **options)
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value), ""
    return None, f"returned {value!r:.80}, which is no finite number"


if __name__ == "__main__":
    main()
