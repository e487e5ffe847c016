"""Starts the ranks of a layout as processes of this machine and ends them together."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from automodel_rl.errors import EXIT_FAILURE
from automodel_rl.launch.flight import last_place, left_flight
from automodel_rl.launch.lifeline import LIFELINE_VARIABLE
from automodel_rl.launch.record import RECORD_FOLDER_VARIABLE, FailureRecord, first_cause, read_records, show
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.launch.terminal import Terminal

GRACE_SECONDS = 3.0
"""Longest wait for the records of other ranks once one rank has failed."""

NOTICE_SECONDS = 0.5
"""A record that is older than the end of a killed rank by so much is not a consequence of that end."""

TAIL_LINES = 20

PORTS = range(16_384, 30_000)
"""Ports on which rank 0 may listen. They lie below those of outgoing connections, on Linux from 32,768."""


def is_rank() -> bool:
    """Whether this process is already a rank of a job (of ours, of torchrun's or of Slurm's through torchrun)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def free_port() -> int:
    """A TCP port of this machine that is free now.

    It is likely to stay free until a rank has started and listens: the system takes no ports of `PORTS` for connections
    that go out.

    Raises:
        OSError: no port is free.
    """
    for port in secrets.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise OSError(f"none of the TCP ports {PORTS.start} to {PORTS.stop - 1} is free: end programs that listen on them")


def run_local_ranks(command: Sequence[str], num_ranks: int, flights: Path | None = None) -> int:
    """Runs `command` once per rank and returns the job's exit code.

    Args:
        command: the command that runs a rank.
        num_ranks: number of ranks of the job.
        flights: folder in which ranks keep the files of their flight recorders, if they do.

    Rank 0 shares this terminal. The other ranks write to files, which are shown only if no record tells the cause of a
    failure. The first rank that fails ends all others. Signals are passed on, so that ranks can save and stop.
    """
    with tempfile.TemporaryDirectory(prefix="automodel_rl_") as folder:
        ranks = _Ranks(Path(folder), flights)
        handlers = {number: signal.signal(number, lambda n, _: ranks.signal(n)) for number in stop_signals()}
        try:
            ranks.start(command, num_ranks)
            return ranks.wait()
        finally:
            ranks.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _Ranks:
    def __init__(self, folder: Path, flights: Path | None):
        self.folder, self.flights = folder, flights
        self.terminal = Terminal()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], num_ranks: int) -> None:
        self.started = time.time()
        their_end, self.our_end = os.pipe()
        shared = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
            **os.environ,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            RECORD_FOLDER_VARIABLE: str(self.folder),
            LIFELINE_VARIABLE: str(their_end),
        }
        for rank in range(num_ranks):
            with contextlib.nullcontext() if rank == 0 else self._log(rank).open("w") as log:
                process = subprocess.Popen(
                    command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                    pass_fds=[their_end],
                    start_new_session=True,  # a terminal's Ctrl-C reaches only us, and we pass it on once
                )
            self.processes.append(process)
        os.close(their_end)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.log"

    def signal(self, number: int) -> None:
        self.terminal.outlive()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        while True:
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return 0
            if any(code not in (None, 0) for code in codes):
                return self._fail()
            time.sleep(0.05)

    def _fail(self) -> int:
        dead, noticed = self._dead(), time.time()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(0.05)
            dead += [rank for rank in self._dead() if rank not in dead]
        self.kill()
        records = read_records(self.folder)
        silent = [rank for rank in dead if rank not in records]
        earlier = [record for record in records.values() if record.time < noticed - NOTICE_SECONDS]
        was_killed = silent and self.processes[silent[0]].returncode == -signal.SIGKILL
        causes = earlier if was_killed else [*records.values()]
        if silent and all(record.is_lost_peer for record in causes):  # killed or crashed
            print(self._tail(silent[0]), end="", file=sys.stderr)
            show(self._record_of(silent[0]))
            return EXIT_FAILURE
        record = first_cause([*records.values()])
        show(record)
        return record.exit_code

    def _dead(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() not in (None, 0)]

    def _tail(self, rank: int) -> str:
        if rank == 0:
            return ""
        return "".join(self._log(rank).read_text(errors="replace").splitlines(keepends=True)[-TAIL_LINES:])

    def _record_of(self, rank: int) -> FailureRecord:
        """A record of what is known about a rank that left none."""
        code = self.processes[rank].returncode
        if code < 0:
            remedy = "; the machine may have run out of memory" if -code == signal.SIGKILL else ""
            line = f"rank {rank} was ended by {signal.Signals(-code).name}{remedy}"
        else:
            line = f"rank {rank} ended with exit code {code} and left no cause"
        file = left_flight(self.flights, rank, self.started)
        return FailureRecord(
            rank,
            EXIT_FAILURE,
            f"error: {line}",
            where="" if file is None else last_place(file),
            pid=self.processes[rank].pid,
            flight=str(file or ""),
        )

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
