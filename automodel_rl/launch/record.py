"""Failure records, and how they are printed: a block of text whose last line says what the user needs to know."""

import contextlib
import json
import os
import re
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from automodel_rl.errors import EXIT_FAILURE
from automodel_rl.files import write_atomic
from automodel_rl.launch.flight import flight

RECORD_FOLDER_VARIABLE = "AUTOMODEL_RL_FAILURES"
"""Environment variable that tells ranks where to write their records for the launcher."""

FAILURE_FILE = "failure.txt"
"""Name of the file with the failure that ended a job."""

LOST_PEER = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Broken pipe|DistNetworkError|DistStoreError|"
    "remote process exited|NCCL communicator was aborted|another rank failed"
)
"""Pattern of the errors that a rank raises when a peer is gone."""


def own_rank() -> int:
    return int(os.environ.get("RANK", 0))


@dataclass(frozen=True)
class FailureRecord:
    """One rank's failure.

    Attributes:
        line: what the user needs to know, in one line.
        trace: the stack trace, if it helps.
        is_everywhere: whether all ranks end together for this reason.
        where: the flight recorder's phases at the time of the failure.
        flight: path of the flight recorder's file; empty if there is none.
    """

    rank: int
    exit_code: int
    line: str
    trace: str = ""
    is_everywhere: bool = False
    where: str = field(default_factory=lambda: flight.where)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)
    flight: str = field(default_factory=lambda: str(flight.file or ""))

    @property
    def is_lost_peer(self) -> bool:
        """Whether the error only says that another rank is gone."""
        return LOST_PEER.search(self.line) is not None

    def block(self) -> str:
        if self.exit_code != EXIT_FAILURE or not self.line.startswith("error: "):
            return self.line  # bad input, or an interrupted run
        facts = {
            "rank": str(self.rank),
            "host": f"{self.host} (process {self.pid})",
            "while": self.where or "starting",
            "flight recorder": f"{Path(self.flight).parent}, one file per rank" if self.flight else "",
        }
        shown = [f"  {name:<16} {value}" for name, value in facts.items() if value]
        return "\n".join([f"{self.trace}the job failed, first on this rank:", *shown, self.line])

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def show(record: FailureRecord) -> None:
    """Prints a record, and saves the text beside the rank's flight recorder."""
    print(record.block(), file=sys.stderr, flush=True)
    if record.flight:
        with contextlib.suppress(OSError):  # the disk itself may have failed
            write_atomic(Path(record.flight).with_name(FAILURE_FILE), record.block())


def from_json(text: str) -> FailureRecord:
    return FailureRecord(**json.loads(text))


def leave_record(folder: Path, record: FailureRecord) -> None:
    write_atomic(folder / f"rank_{record.rank}.json", record.to_json())


def read_records(folder: Path) -> dict[int, FailureRecord]:
    records = [from_json(path.read_text()) for path in folder.glob("rank_*.json")]
    return {record.rank: record for record in records}


def first_cause(records: list[FailureRecord]) -> FailureRecord:
    """Returns the earliest record that is not a lost peer, or the earliest of all if every one is."""
    causes = [record for record in records if not record.is_lost_peer]
    return min(causes or records, key=lambda record: record.time)
