"""Ends ranks with their launcher, however it ends: each rank holds an end of a pipe that closes with the launcher."""

import os
import threading

from automodel_rl.errors import EXIT_FAILURE

LIFELINE_VARIABLE = "AUTOMODEL_RL_LIFELINE"
"""Environment variable with the file descriptor of the rank's end."""


def hold_lifeline() -> None:
    """Makes this process, a rank, end when its launcher is gone."""
    descriptor = os.environ.get(LIFELINE_VARIABLE)
    if descriptor is not None:
        threading.Thread(target=_wait, args=(int(descriptor),), daemon=True, name="lifeline").start()


def _wait(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: this returns when the other end closes
    os._exit(EXIT_FAILURE)
