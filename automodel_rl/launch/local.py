"""Starts the ranks of a layout as processes on this machine and ends them together."""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from automodel_rl.errors import EXIT_OK
from automodel_rl.files import TemporaryFolder
from automodel_rl.launch.rank_processes import NodeShare, RankProcesses
from automodel_rl.launch.record import show
from automodel_rl.launch.stop_signal import Terminal, stop_signals

PORTS = range(16_384, 30_000)
"""Ports that rank 0 may listen on: below Linux's range for outgoing connections, which starts at 32,768."""


def is_rank() -> bool:
    """Whether this process is a rank of a job already, started by us, by torchrun, or by Slurm through torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def free_port() -> int:
    """Returns a free TCP port. It is likely to stay free until a rank listens on it, as the system assigns none of
    `PORTS` to outgoing connections. Raises OSError if no port is free."""
    first = secrets.randbelow(len(PORTS))
    for number in range(len(PORTS)):
        port = PORTS[(first + number) % len(PORTS)]
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"no TCP port from {PORTS.start} to {PORTS.stop - 1} is free: stop programs that listen on them")


def run_local_ranks(command: Sequence[str], num_ranks: int, flights: Path | None = None) -> int:
    """Runs `command` once per rank and returns the job's exit code.

    Rank 0 shares this terminal. The other ranks write to files, which are shown only if no record tells the cause of
    a failure. The first failing rank ends all others. Stop signals are forwarded, so that ranks can save and stop.

    Args:
        flights: folder of the ranks' flight recorder files, if any, to report what failed ranks were doing.
    """
    with TemporaryFolder() as folder:
        ranks, terminal = RankProcesses(Path(folder), flights), Terminal()

        def pass_on(number: int, _: object) -> None:
            terminal.discard_output_if_closed()
            ranks.signal(number)

        handlers = {number: signal.signal(number, pass_on) for number in stop_signals()}
        try:
            ranks.start(command, NodeShare(0, num_ranks, num_ranks, "localhost", free_port()), os.environ, shown=0)
            while ranks.exit_code is None:
                time.sleep(0.05)
            return EXIT_OK if ranks.exit_code == EXIT_OK else _show_cause(ranks)
        finally:
            ranks.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _show_cause(ranks: RankProcesses) -> int:
    ends = ranks.end()
    if ends.is_silent:
        print(ends.tail, end="", file=sys.stderr)
    show(ends.cause)
    return ends.cause.exit_code
