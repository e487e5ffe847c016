"""Node agent: an actor that starts a node's ranks as processes and reports to the driver."""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from automodel_rl.files import TemporaryFolder
from automodel_rl.launch.local import free_port
from automodel_rl.launch.rank_processes import NodeShare, RankFailures, RankProcesses
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.ray.cluster import device_order

MAX_BYTES = 1 << 20
"""Maximum output sent to the driver at once."""


@dataclass(frozen=True)
class NodeLocation:
    """Network location of a node. `port` is a free port."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class AgentProgress:
    """Events on a node since the last poll.

    Attributes:
        output: new output of rank 0, if it is on this node.
        exit_code: as in `RankProcesses`.
    """

    output: bytes
    exit_code: int | None


class NodeAgent:
    """Starts and ends the ranks of its node. Ranks end with their agent."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder()

    def location(self) -> NodeLocation:
        return NodeLocation(socket.gethostname(), ray.util.get_node_ip_address(), free_port())

    def start(
        self, command: Sequence[str], share: NodeShare, environment: dict[str, str], cwd: str, flights: Path | None
    ) -> str:
        """Starts the ranks. Returns why they cannot be started, or "".

        Args:
            command: Python arguments that run a rank.
            environment: the driver's variables, for those that this node lacks.
            cwd: the driver's working directory.
            flights: as in `RankProcesses`.
        """
        if not Path(cwd).is_dir():
            return f"the driver's folder {cwd} does not exist: start from a folder that all nodes have"
        os.chdir(cwd)
        self._ranks, self._shown = RankProcesses(Path(self._folder.name), flights), 0
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's own choice
        if "CUDA_VISIBLE_DEVICES" in own:  # in hardware order, so that adjacent ranks use adjacent GPUs
            own["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(own["CUDA_VISIBLE_DEVICES"].split(","), key=device_order))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())  # Ray blocks SIGINT, and ranks would inherit that
        self._ranks.start([sys.executable, *command], share, environment | own, shown=None)
        return ""

    def progress(self, signals: Sequence[int]) -> AgentProgress:
        """Forwards signals to the ranks, and returns what has happened since the last call."""
        for number in signals:
            self._ranks.signal(number)
        exit_code = self._ranks.exit_code  # read before the output, so that the output is complete
        output = b""
        if self._ranks.share.first == 0:
            with self._ranks.log(0).open("rb") as log:
                log.seek(self._shown)
                output = log.read(MAX_BYTES)
            self._shown += len(output)
        return AgentProgress(output, None if len(output) == MAX_BYTES else exit_code)

    def end(self) -> RankFailures:
        return self._ranks.end()

    def close(self) -> None:
        self._folder.cleanup()
