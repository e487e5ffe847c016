"""The agent of a node: an actor that starts the node's ranks as processes, and tells the driver of them."""

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
from automodel_rl.launch.rank_processes import Ends, NodeShare, RankProcesses
from automodel_rl.launch.stop_signal import stop_signals
from automodel_rl.ray.cluster import device_order

MOST_BYTES = 1 << 20
"""Most bytes of output that the driver gets at once."""


@dataclass(frozen=True)
class Place:
    """A node as the ranks' network sees it.

    Attributes:
        host: its name.
        address: its IP address.
        port: a port that is free there.
    """

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class AgentProgress:
    """What has happened on a node since the driver last asked.

    Attributes:
        output: what rank 0 has printed, if it is on this node.
        exit_code: as of `RankProcesses`.
    """

    output: bytes
    exit_code: int | None


class NodeAgent:
    """Starts and ends the ranks of its node. If the agent ends, however it does, its ranks end with it."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder()

    def place(self) -> Place:
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), free_port())

    def start(
        self, command: Sequence[str], share: NodeShare, environment: dict[str, str], cwd: str, flights: Path | None
    ) -> str:
        """Starts the ranks.

        Args:
            command: arguments of Python, which run a rank.
            share: which ranks.
            environment: variables of the driver, for those that this node lacks.
            cwd: the driver's working directory.
            flights: as of `RankProcesses`.

        Returns:
            Why they cannot be started; "" if they are.
        """
        if not Path(cwd).is_dir():
            return f"the driver's folder {cwd} is not there: start from a folder that all nodes have"
        os.chdir(cwd)
        self._ranks, self._shown = RankProcesses(Path(self._folder.name), flights), 0
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's own choice
        if "CUDA_VISIBLE_DEVICES" in own:  # in the order of the hardware, so that neighbours in rank are neighbours
            own["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(own["CUDA_VISIBLE_DEVICES"].split(","), key=device_order))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())  # Ray blocks SIGINT, and ranks would inherit that
        self._ranks.start([sys.executable, *command], share, environment | own, shown=None)
        return ""

    def progress(self, signals: Sequence[int]) -> AgentProgress:
        """What has happened; first passes signals on to the ranks."""
        for number in signals:
            self._ranks.signal(number)
        exit_code = self._ranks.exit_code  # before the output, which then is whole
        output = b""
        if self._ranks.share.first == 0:
            with self._ranks.log(0).open("rb") as log:
                log.seek(self._shown)
                output = log.read(MOST_BYTES)
            self._shown += len(output)
        return AgentProgress(output, None if len(output) == MOST_BYTES else exit_code)

    def end(self) -> Ends:
        """Ends all ranks and says how they ended."""
        return self._ranks.end()

    def close(self) -> None:
        """Removes what the agent has written on its node."""
        self._folder.cleanup()
