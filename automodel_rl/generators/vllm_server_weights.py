"""Weight channel to vLLM servers: the first rank sends messages over HTTP, the others only count versions."""

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from automodel_rl.errors import WeightSyncError, innermost
from automodel_rl.generator_messages import Answer, Call, Committed, Failure, Message, unknown
from automodel_rl.generators.vllm_http import PROBE_SECONDS, VllmServer, at_once


class ServerWeights:
    """A `VllmChannel` to all servers of a run. Handles messages in order, in the background.

    After a failed weight sync the servers have no complete weights, and must be restarted.

    Args:
        leads: this rank sends to the servers. Other ranks only count versions.

    Attributes:
        version: of the servers' weights.
        members: the servers that get weights. `num_workers` chooses those that answer.
        is_broken: a weight sync has failed.
    """

    def __init__(self, servers: Sequence[VllmServer], leads: bool):
        self.servers, self.leads = servers, leads
        self.members = list(servers)
        self.version = 0
        self.is_broken = False
        self._coming = 0
        self._orders = ThreadPoolExecutor(1)
        self._answers: deque[Message] = deque()

    @property
    def num_workers(self) -> int:
        """Number of processes of the servers that answer; 0 on ranks that do not lead. Raises OSError if none
        answers."""
        if not self.leads:
            return 0
        self.members = [server for server in self.servers if is_there(server)]
        if not self.members:
            raise OSError(f"none of {', '.join(server.url for server in self.servers)} answers")
        return sum(self._world_sizes())

    @property
    def addresses(self) -> list[str]:
        """URLs of the members, which the leading rank shares with the others."""
        return [server.url for server in self.members]

    def send(self, message: Message) -> None:
        if not self.leads:
            self._count(message)
            return
        try:
            self._orders.submit(self._pass_on, message)
        except RuntimeError:
            raise WeightSyncError("the connection to the servers is closed") from None

    def ready(self) -> bool:
        return bool(self._answers)

    def receive(self) -> Message:
        return self._answers.popleft()

    def close(self) -> None:
        """Drops unsent messages."""
        self._orders.shutdown(wait=False, cancel_futures=True)

    def _pass_on(self, message: Message) -> None:
        """Handles a message on all servers. Running requests pause during a weight sync."""
        try:
            match message:
                case Call("init_transfer", (info,)):
                    self._init(info)
                    self._answers.append(Answer("init_transfer"))
                case Call("begin", (version, _)):
                    self._coming, self.is_broken = version, False
                    self._to_all("/pause?mode=keep", {})
                    self._to_all("/start_weight_update", {"is_checkpoint_format": True})
                case Call("load_weights", (info,)) if not self.is_broken:
                    self._to_all("/update_weights", {"update_info": info})
                    self._answers.append(Answer("load_weights"))
                case Call("commit") if not self.is_broken:
                    self._to_all("/finish_weight_update", {})
                    self.version = self._coming
                    self._to_all("/resume", {})
                    self._answers.append(Answer("commit", Committed(self.version)))
                case Call("load_weights" | "commit" | "give_up"):
                    pass  # left over from a weight sync that failed
                case _:
                    raise unknown(message)
        except Exception as error:
            self.is_broken = True
            self._answers.append(Failure(innermost(error)))

    def _count(self, message: Message) -> None:
        match message:
            case Call("init_transfer", (info,)):
                self.members = [VllmServer(url) for url in info.get("servers", self.addresses)]
                self._answers.append(Answer("init_transfer"))
            case Call("begin", (version, _)):
                self._coming = version
            case Call("load_weights"):
                self._answers.append(Answer("load_weights"))
            case Call("commit"):
                self.version = self._coming
                self._answers.append(Answer("commit", Committed(self.version)))
            case Call("give_up"):
                pass
            case _:
                raise unknown(message)

    def _init(self, info: dict[str, Any]) -> None:
        if "buffers" in info:  # in shared memory
            self._to_all("/init_weight_transfer_engine", {"init_info": info})
            return
        info = {key: value for key, value in info.items() if key != "servers"}
        offsets = itertools.accumulate(self._world_sizes(), initial=info["rank_offset"])
        bodies = [{"init_info": {**info, "rank_offset": offset}} for offset in offsets]

        def init(server: VllmServer, body: dict[str, Any]) -> None:
            server.post("/init_weight_transfer_engine", body)

        at_once(init, self.members, bodies)

    def _world_sizes(self) -> list[int]:
        return [server.get("/get_world_size?include_dp=true")["world_size"] for server in self.members]

    def _to_all(self, path: str, body: dict[str, Any]) -> None:
        at_once(lambda server: server.post(path, body), self.members)


def is_there(server: VllmServer) -> bool:
    """Returns whether a server answers, and no weight sync to it has failed."""
    try:
        return not server.get("/is_paused", PROBE_SECONDS)["is_paused"]
    except (OSError, ValueError):
        return False
