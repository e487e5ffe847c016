"""The processes in which xdist runs tests, as forks of one process that has imported the libraries (`tests.warm`).

Each of them would else import for 15 seconds what the others import, too, and start a process to fork from.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from execnet import gateway_io

from tests.warm import CAN_FORK, WarmProcess


class _Worker(gateway_io.Popen2IO):
    """A fork with the pipes that execnet talks through.

    Args:
        args: the command that execnet would start; a fork reads what to do in the same way.
        execmodel: of execnet.
    """

    def __init__(self, args: Sequence[str], execmodel: Any):
        stdin, ours = os.pipe()
        output, stdout = os.pipe()
        self.popen = WarmProcess([sys.executable, "-m", "tests.xdist_workers"], stdin=stdin, stdout=stdout)
        os.close(stdin)
        os.close(stdout)
        super().__init__(os.fdopen(ours, "wb"), os.fdopen(output, "rb"), execmodel=execmodel)

    def wait(self) -> int:
        return self.popen.wait()

    def kill(self) -> None:
        self.popen.kill()


def start_workers_warm() -> None:
    """Lets xdist, in the process that it starts others from, start them as forks."""
    if CAN_FORK:
        gateway_io.Popen2IOMaster = _Worker


if __name__ == "__main__":
    exec(eval(sys.stdin.readline()))  # as `execnet.gateway_io.popen_bootstrapline` does
