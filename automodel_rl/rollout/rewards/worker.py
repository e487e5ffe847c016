"""The process that runs a reward function, so that one that never returns can be ended.

python -m automodel_rl.rollout.rewards.worker FUNCTION

Pickled (completion, example, options) in on stdin; pickled (score, error) out on what was stdout.
"""

import ctypes
import math
import os
import pickle
import signal
import sys
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.rollout.rewards.functions import find_reward

PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":  # a reward that never returns must not outlive the job
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reward prints must not end up among the answers
    try:
        function = find_reward(sys.argv[1])
    except InputError as error:
        _send(answers, (None, str(error)))
        return
    _send(answers, (None, ""))
    while True:
        try:
            completion, example, options = pickle.load(requests)
        except EOFError:
            return
        try:
            score = function(completion, example, **options)
        except Exception as error:
            _send(answers, (None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
            continue
        is_score = isinstance(score, int | float) and math.isfinite(score)
        _send(answers, (float(score), "") if is_score else (None, f"returned {score!r:.80}, which is no finite number"))


def _send(answers: Any, answer: tuple[float | None, str]) -> None:
    pickle.dump(answer, answers)
    answers.flush()


if __name__ == "__main__":
    main()
