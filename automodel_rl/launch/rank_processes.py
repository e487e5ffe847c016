"""Ranks as processes on this machine: started, watched, and ended together."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_rl.errors import EXIT_FAILURE
from automodel_rl.launch.flight import last_phase, left_flight
from automodel_rl.launch.lifeline import LIFELINE_VARIABLE
from automodel_rl.launch.record import RECORD_FOLDER_VARIABLE, FailureRecord, first_cause, read_records

GRACE_SECONDS = 3.0
"""Longest wait for the records of other ranks after one rank has failed."""

NOTICE_SECONDS = 0.5
"""A record at least this much older than a killed rank's end was not caused by it."""

TAIL_LINES = 20


@dataclass(frozen=True)
class NodeShare:
    """One machine's ranks of a job.

    Attributes:
        first: global index of the first rank on this machine.
        count: number of ranks on this machine.
        address, port: where rank 0 listens.
    """

    first: int
    count: int
    world_size: int
    address: str
    port: int


@dataclass(frozen=True)
class RankFailures:
    """How the ranks of a failed job ended.

    Attributes:
        records: records left by failed ranks.
        silent: records made up for failed ranks that left none, in the order in which they ended.
        tail: the last output of the first silent rank.
        was_killed: whether the first silent rank got SIGKILL.
        noticed: `time.time()` at which the first failure was noticed.
    """

    records: list[FailureRecord]
    silent: list[FailureRecord]
    tail: str
    was_killed: bool
    noticed: float

    @property
    def cause(self) -> FailureRecord:
        """The record that explains the failure: a silent rank's, unless another rank reports a cause of its own."""
        return self.silent[0] if self.is_silent else first_cause(self.records)

    @property
    def is_silent(self) -> bool:
        """Whether the first rank to fail left no record, because it was killed or crashed."""
        earlier = [record for record in self.records if record.time < self.noticed - NOTICE_SECONDS]
        causes = earlier if self.was_killed else self.records
        return bool(self.silent) and all(record.is_lost_peer for record in causes)


class RankProcesses:
    """The rank processes of one machine.

    Args:
        folder: receives their output and records.
        flights: folder of their flight recorder files, if any.
    """

    def __init__(self, folder: Path, flights: Path | None):
        self.folder, self.flights = folder, flights
        self.share = NodeShare(0, 0, 0, "", 0)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], share: NodeShare, environment: Mapping[str, str], *, shown: int | None
    ) -> None:
        """Starts every rank of the share.

        Args:
            environment: environment of the ranks, to which the variables that number them are added.
            shown: global rank that shares this process's terminal. The others write to files.
        """
        self.share, self.started = share, time.time()
        their_end, self.our_end = os.pipe()
        shared = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // share.count)),
            **environment,
            "WORLD_SIZE": str(share.world_size),
            "LOCAL_WORLD_SIZE": str(share.count),
            "MASTER_ADDR": share.address,
            "MASTER_PORT": str(share.port),
            RECORD_FOLDER_VARIABLE: str(self.folder),
            LIFELINE_VARIABLE: str(their_end),
        }
        for local_rank in range(share.count):
            rank = share.first + local_rank
            with contextlib.nullcontext() if rank == shown else self.log(rank).open("w") as log:
                process = subprocess.Popen(
                    command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                    stdout=log,
                    stderr=log,
                    pass_fds=[their_end],
                    start_new_session=True,  # a terminal's Ctrl-C reaches only us, and we forward it once
                )
            self.processes.append(process)
        os.close(their_end)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.log"

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    @property
    def exit_code(self) -> int | None:
        """0 if every rank has succeeded, 1 if any has failed, None while ranks are running."""
        codes = [process.poll() for process in self.processes]
        if any(code not in (None, 0) for code in codes):
            return EXIT_FAILURE
        return 0 if all(code == 0 for code in codes) else None

    def end(self) -> RankFailures:
        """Kills all ranks, after giving them `GRACE_SECONDS` to leave their records."""
        dead, noticed = self._dead(), time.time()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(0.05)
            dead += [index for index in self._dead() if index not in dead]
        self.kill()
        records = read_records(self.folder)
        silent = [index for index in dead if self.share.first + index not in records]
        return RankFailures(
            [*records.values()],
            [self._record_of(index) for index in silent],
            self._tail(silent[0]) if silent else "",
            bool(silent) and self.processes[silent[0]].returncode == -signal.SIGKILL,
            noticed,
        )

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _dead(self) -> list[int]:
        return [index for index, process in enumerate(self.processes) if process.poll() not in (None, 0)]

    def _tail(self, index: int) -> str:
        log = self.log(self.share.first + index)
        if not log.is_file():
            return ""
        return "".join(log.read_text(errors="replace").splitlines(keepends=True)[-TAIL_LINES:])

    def _record_of(self, index: int) -> FailureRecord:
        rank, process = self.share.first + index, self.processes[index]
        code = process.returncode
        if code < 0:
            remedy = "; the machine may have run out of memory" if -code == signal.SIGKILL else ""
            line = f"rank {rank} was killed by {signal.Signals(-code).name}{remedy}"
        else:
            line = f"rank {rank} exited with code {code} without reporting a cause"
        file = left_flight(self.flights, rank, self.started)
        return FailureRecord(
            rank,
            EXIT_FAILURE,
            f"error: {line}",
            where="" if file is None else last_phase(file),
            pid=process.pid,
            flight=str(file or ""),
        )
