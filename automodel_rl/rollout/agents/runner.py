"""Runners of agents: a forked process for each, or the worker of another package, and framing of their messages."""

import asyncio
import contextlib
import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from automodel_rl.config.episodes import VerifiersConfig
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.generators.child_process import ChildEndedError, ChildProcess
from automodel_rl.rollout.agents.agent_server import AgentSetup
from automodel_rl.rollout.agents.protocol import AgentEndpoint, AgentResult
from automodel_rl.rollout.episodes.fork_pool import START_SECONDS, ForkPool

MAX_BYTES = 2**20
CHUNK_BYTES = 2**16


class FrameReader:
    """Reads pickled messages in an event loop, without blocking on a partial one."""

    def __init__(self, connection: Connection):
        self._connection, self._data = connection, bytearray()

    def take(self) -> list[Any]:
        """Returns the messages that are now complete. To be called when the connection is readable.

        Raises:
            EOFError: the other end is closed.
            OSError: the connection is broken, or a message is too large.
        """
        data = os.read(self._connection.fileno(), CHUNK_BYTES)
        if not data:
            raise EOFError
        self._data += data
        found = []
        while len(self._data) >= 4:
            (size,) = struct.unpack("!i", self._data[:4])
            if not 0 <= size <= MAX_BYTES:
                raise OSError(f"a message of more than {MAX_BYTES} bytes")
            if len(self._data) < 4 + size:
                break
            found.append(pickle.loads(bytes(self._data[4 : 4 + size])))
            del self._data[: 4 + size]
        return found


Returned = Callable[[AgentResult, str], None]
"""Called once with an agent's result and its error, empty if it succeeded."""

End = Callable[[], None]
"""Ends an agent at once. `Returned` is not called afterwards."""


WORKER = Path(__file__).with_name("verifiers_worker.py")


class AgentRunner(Protocol):
    """Runs agents. All methods but `close` are called in the endpoint's event loop."""

    async def begin(self, address: AgentEndpoint, example: dict[str, Any], returned: Returned) -> End:
        """Starts an agent, and calls `returned` in the event loop when it ends. Raises InputError if it cannot
        start."""
        ...

    def close(self) -> None: ...


class ForkedAgents:
    """Runs a function, each time in its own process.

    Args:
        agent: import path.
        log: file for the agents' output.

    Raises:
        InputError: it cannot be imported.
    """

    def __init__(self, agent: str, log: Path):
        setup = AgentSetup(agent, str(log))
        self._processes = ForkPool("automodel_rl.rollout.agents.agent_server", setup, f"agent={agent}")
        self._starter = ThreadPoolExecutor(1, "agents_starter")

    async def begin(self, address: AgentEndpoint, example: dict[str, Any], returned: Returned) -> End:
        loop = asyncio.get_running_loop()
        # In a thread: a start takes 10 ms or more, and other agents call meanwhile.
        number, connection = await loop.run_in_executor(self._starter, self._processes.begin)

        def leave(*, immediately: bool) -> None:
            loop.remove_reader(connection.fileno())
            connection.close()
            self._processes.end(number, immediately=immediately)

        reader = FrameReader(connection)

        def take() -> None:
            result, error = AgentResult(None), "its process exited before it returned"
            try:
                messages = reader.take()
                if not messages:
                    return
                found, error = messages[0]
                result = found or result
            except (EOFError, OSError):
                pass
            except Exception as problem:  # the agent wrote to the connection
                error = f"its process sent an unreadable message ({describe_root_cause(problem)})"
            leave(immediately=bool(error))
            returned(result, error)

        loop.add_reader(connection.fileno(), take)
        try:
            connection.send((address, example))
        except OSError:  # it has ended: the reader reports it
            pass
        except BaseException:
            leave(immediately=True)
            raise
        return lambda: leave(immediately=True)

    def close(self) -> None:
        self._starter.shutdown(wait=False, cancel_futures=True)
        self._processes.close()  # also cancels a pending start
        self._starter.shutdown()


class VerifiersAgents:
    """Runs tasks of a verifiers taskset, all in one worker with its own interpreter.

    Raises:
        InputError: the worker does not start, or the taskset cannot be loaded.
    """

    def __init__(self, config: VerifiersConfig, max_turns: int):
        self.config, self.max_turns = config, max_turns
        self._returned: dict[int, Returned] = {}
        self._number = 0
        self._worker: ChildProcess | None
        self._worker, self.num_tasks = self._start()
        self._reader: FrameReader | None = None

    async def begin(self, address: AgentEndpoint, example: dict[str, Any], returned: Returned) -> End:
        task = example.get("task")
        if not isinstance(task, int) or not 0 <= task < self.num_tasks:
            raise InputError(
                f"a prompt has task={task!r}, but {self.config.taskset} has {self.num_tasks} tasks: set each prompt's "
                "`task` to the number of its task (automodel-rl tasks writes such prompts)"
            )
        if self._worker is None:  # it was lost
            self._worker, self.num_tasks = self._start()
        if self._reader is None:
            self._reader = FrameReader(self._worker.connection)
            asyncio.get_running_loop().add_reader(self._worker.connection.fileno(), self._take)
        self._number += 1
        number = self._number
        self._returned[number] = returned
        try:
            self._worker.send(("begin", number, task, address.base_url, address.key))
        except ChildEndedError:
            self._fail_all()

        def end() -> None:
            self._returned.pop(number, None)
            with contextlib.suppress(ChildEndedError):
                if self._worker is not None:
                    self._worker.send(("end", number))

        return end

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _start(self) -> tuple[ChildProcess, int]:
        what = f"rollout.verifiers.python={self.config.python}"
        try:
            worker = ChildProcess([self.config.python, str(WORKER)])
        except OSError as problem:
            raise InputError(f"{what}: cannot be started ({problem.strerror})") from None
        try:
            worker.send(self.config.model_dump() | {"max_turns": self.max_turns})
            num_tasks, error = worker.receive(START_SECONDS)
        except (ChildEndedError, TimeoutError):
            num_tasks, error = 0, "its worker failed to start: check that this interpreter has verifiers 0.4 or later"
        if error:
            worker.close()
            raise InputError(f"{what} with taskset={self.config.taskset}: {error}")
        return worker, num_tasks

    def _take(self) -> None:
        assert self._reader is not None
        try:
            for number, reward, metrics, error in self._reader.take():
                if number in self._returned:
                    self._returned.pop(number)(AgentResult(reward, metrics), error)
        except Exception:  # it has ended, or sent garbage
            self._fail_all()

    def _fail_all(self) -> None:
        """Fails all running episodes: the worker ended. The next episode starts another."""
        if self._worker is None:
            return
        if self._reader is not None:
            asyncio.get_running_loop().remove_reader(self._worker.connection.fileno())
            self._reader = None
        worker, self._worker = self._worker, None
        worker.close()
        lost, self._returned = self._returned, {}
        for returned in lost.values():
            returned(AgentResult(None), "the verifiers worker exited")


def print_tasks(taskset: str, python: str, args: str) -> None:
    """Prints the tasks of a verifiers taskset as prompts.

    Args:
        python: interpreter with verifiers.
        args: the taskset's settings, as JSON.

    Raises:
        InputError: they cannot be read.
    """
    command = [python, str(WORKER), "--tasks", taskset, args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"--python {python}: cannot be started ({error.strerror})") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        raise InputError(f"tasks {taskset}: cannot be read with {python}: {last}")
    print(done.stdout, end="")
