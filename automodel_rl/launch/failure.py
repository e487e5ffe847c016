"""The first cause of a failure: every rank that fails leaves a record, and the launcher shows the earliest."""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from automodel_rl.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_OK,
    InputError,
    JobEndedError,
    MicrobatchError,
    innermost,
)
from automodel_rl.files import write_complete
from automodel_rl.launch.lifeline import hold_lifeline
from automodel_rl.launch.peers import tell_peers

RECORD_FOLDER_VARIABLE = "AUTOMODEL_RL_FAILURES"
"""Environment variable by which a launcher tells its ranks where to leave their records."""

LOST_PEER = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Broken pipe|DistNetworkError|DistStoreError|"
    "remote process exited"
)
"""What a rank's own error says when a peer has gone."""


@dataclass(frozen=True)
class FailureRecord:
    rank: int
    time: float
    exit_code: int
    line: str
    trace: str

    @property
    def is_lost_peer(self) -> bool:
        """Whether this rank only noticed that another one was gone."""
        return LOST_PEER.search(self.line) is not None


def guard(work: Callable[[], None]) -> int:
    """Runs a rank's `work` and returns the exit code; a failure leaves a record, or is printed without a launcher.

    A rank that has peers does not return: it leaves at once, for taking down the process group of a failed job waits
    for peers that wait for this rank.
    """
    hold_lifeline()
    code = _run(work)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if code != EXIT_OK:
            tell_peers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(work: Callable[[], None]) -> int:
    try:
        work()
    except InputError as error:
        return _report(EXIT_BAD_INPUT, f"error: {error}", "")
    except JobEndedError as error:
        return _report(EXIT_FAILURE, str(error), "")
    except KeyboardInterrupt:
        return _report(EXIT_FAILURE, "interrupted", "")
    except BaseException as error:  # also SystemExit of a library: peers must learn that this rank is gone
        return _report(EXIT_FAILURE, f"error: {describe(error)}", traceback.format_exc())
    return EXIT_OK


def describe(error: BaseException) -> str:
    """One line on what failed, with stage and microbatch where one was running."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MicrobatchError):
            return f"rank {os.environ.get('RANK', 0)}: {chain}"
        chain = chain.__cause__
    return f"rank {os.environ.get('RANK', 0)}: {innermost(error)}"


def _report(exit_code: int, line: str, trace: str) -> int:
    record = FailureRecord(int(os.environ.get("RANK", 0)), time.time(), exit_code, line, trace)
    folder = os.environ.get(RECORD_FOLDER_VARIABLE)
    if folder is None:
        print(f"{trace}{line}", file=sys.stderr, flush=True)
    else:
        write_complete(Path(folder) / f"rank_{record.rank}.json", json.dumps(asdict(record)))
    return exit_code


def read_failures(folder: Path) -> dict[int, FailureRecord]:
    """The records in a folder by rank."""
    records = [FailureRecord(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
    return {record.rank: record for record in records}
