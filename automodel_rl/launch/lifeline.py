"""Ends ranks when their launcher ends, however it ends: each rank holds one end of a pipe that closes with the
launcher."""

import os
import threading

from automodel_rl.errors import EXIT_FAILURE

LIFELINE_VARIABLE = "AUTOMODEL_RL_LIFELINE"
"""Environment variable with the file descriptor of the rank's end of the pipe."""


def hold_lifeline() -> None:
    """Makes this rank exit when its launcher is gone."""
    descriptor = os.environ.get(LIFELINE_VARIABLE)
    if descriptor is not None:
        threading.Thread(target=_wait, args=(int(descriptor),), daemon=True, name="lifeline").start()


def _wait(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: this returns when the other end closes
    os._exit(EXIT_FAILURE)
