"""Weight channel to vLLM servers: the first rank sends messages over HTTP, the others only count versions."""

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from automodel_rl.errors import WeightSyncError, describe_root_cause
from automodel_rl.generator_messages import Answer, Call, Committed, Failure, Message, unknown
from automodel_rl.generators.vllm_http import PROBE_SECONDS, VllmServer, run_concurrently


class ServerWeights:
    """A `VllmChannel` to all servers of a run. Handles messages in order, in the background.

    After a failed weight sync the servers have no complete weights, and must be restarted.

    Args:
        is_leader: this rank sends to the servers. Other ranks only count versions.

    Attributes:
        version: of the servers' weights.
        members: the servers that get weights. `num_workers` chooses those that answer.
        is_broken: a weight sync has failed.
    """

    def __init__(self, servers: Sequence[VllmServer], is_leader: bool):
        self.servers, self.is_leader = servers, is_leader
        self.members = list(servers)
        self.version = 0
        self.is_broken = False
        self._pending_version = 0
        self._orders = ThreadPoolExecutor(1)
        self._answers: deque[Message] = deque()

    @property
    def num_workers(self) -> int:
        """Number of processes of the servers that answer; 0 on ranks that do not lead. Raises OSError if none
        answers."""
        if not self.is_leader:
            return 0
        self.members = [server for server in self.servers if is_available(server)]
        if not self.members:
            raise OSError(f"none of {', '.join(server.url for server in self.servers)} answers")
        return sum(self._world_sizes())

    @property
    def addresses(self) -> list[str]:
        """URLs of the members, which the leading rank shares with the others."""
        return [server.url for server in self.members]

    def send(self, message: Message) -> None:
        if not self.is_leader:
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
                    self._pending_version, self.is_broken = version, False
                    self._to_all("/pause?mode=keep", {})
                    self._to_all("/start_weight_update", {"is_checkpoint_format": True})
                case Call("load_weights", (info,)) if not self.is_broken:
                    self._to_all("/update_weights", {"update_info": info})
                    self._answers.append(Answer("load_weights"))
                case Call("commit") if not self.is_broken:
                    self._to_all("/finish_weight_update", {})
                    self.version = self._pending_version
                    self._to_all("/resume", {})
                    self._answers.append(Answer("commit", Committed(self.version)))
                case Call("load_weights" | "commit" | "abort"):
                    pass  # left over from a weight sync that failed
                case _:
                    raise unknown(message)
        except Exception as error:
            self.is_broken = True
            self._answers.append(Failure(describe_root_cause(error)))

    def _count(self, message: Message) -> None:
        match message:
            case Call("init_transfer", (info,)):
                self.members = [VllmServer(url) for url in info.get("servers", self.addresses)]
                self._answers.append(Answer("init_transfer"))
            case Call("begin", (version, _)):
                self._pending_version = version
            case Call("load_weights"):
                self._answers.append(Answer("load_weights"))
            case Call("commit"):
                self.version = self._pending_version
                self._answers.append(Answer("commit", Committed(self.version)))
            case Call("abort"):
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

        run_concurrently(init, self.members, bodies)

    def _world_sizes(self) -> list[int]:
        return [server.get("/get_world_size?include_dp=true")["world_size"] for server in self.members]

    def _to_all(self, path: str, body: dict[str, Any]) -> None:
        run_concurrently(lambda server: server.post(path, body), self.members)


def is_available(server: VllmServer) -> bool:
    """Returns whether a server answers, and no weight sync to it has failed."""
    try:
        return not server.get("/is_paused", PROBE_SECONDS)["is_paused"]
    except (OSError, ValueError):
        return False
