"""Ranks that stay alive over many tests, for what torch does for the first time takes seconds; groups are made anew.

`python -m tests.rank_pool RANK DESCRIPTOR STACKS` is a rank.
"""

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from automodel_rl.launch.local import free_port
from automodel_rl.launch.record import LOST_PEER
from tests.processes import Patience
from tests.warm import popen

MAX_FILES = 500
"""Open files of a rank above which a new one takes its place: torch's caches of sharding rules keep meshes, and with
them the sockets of process groups, from test to test."""

GRACE_SECONDS = 1.0
"""How long the other ranks may take to say what they know once one has failed."""


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    stacks: Path
    """File to which the rank writes the stacks of its threads on SIGUSR1."""


class RankPool:
    """`ranks(n).run(function, *args)` calls a module-level function on n ranks and returns the results in rank order.

    A failing rank's traceback is what the test shows first. The ranks are then ended, for their peers may be waiting
    inside a collective, and new ones start with the next test.
    """

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []

    def __call__(self, num_ranks: int) -> "Ranks":
        return Ranks(self, num_ranks)

    def run(self, num_ranks: int, function: Callable[..., Any], args: tuple) -> list[Any]:
        __tracebackhide__ = True
        if any(rank.process.poll() is not None for rank in self.ranks):
            self.stop()
        while len(self.ranks) < num_ranks:
            self.ranks.append(self._start(len(self.ranks)))
        port = free_port()
        for rank in self.ranks[:num_ranks]:
            rank.pipe.send((function, args, num_ranks, port))
        try:
            results, errors = self._collect(num_ranks)
        except BaseException:  # Ctrl-C, too: what they would answer later must not meet the next test
            self.stop()
            raise
        if errors:
            self.stop()
            raise AssertionError(_describe(errors)) from None
        open_files = [Path(f"/proc/{rank.process.pid}/fd") for rank in self.ranks]  # on Linux only
        if any(folder.is_dir() and len(os.listdir(folder)) > MAX_FILES for folder in open_files):
            self.stop()
        return [results[rank] for rank in range(num_ranks)]

    def _collect(self, num_ranks: int) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        patience = Patience(lambda: [rank.process.pid for rank in self.ranks[:num_ranks]])
        while len(results) + len(errors) < num_ranks:
            left = [n for n in range(num_ranks) if n not in results and n not in errors]
            ready = wait([self.ranks[n].pipe for n in left], GRACE_SECONDS)
            if not ready and errors:
                break  # the others wait for those that failed
            if not ready and patience.is_over:
                raise TimeoutError("\n".join(f"rank {n} did not answer; it is at\n{self._stacks(n)}" for n in left))
            for n in left:
                if self.ranks[n].pipe in ready:
                    self._receive(n, results, errors)
        return results, errors

    def _receive(self, n: int, results: dict[int, Any], errors: dict[int, str]) -> None:
        try:
            error, result = self.ranks[n].pipe.recv()
        except (EOFError, OSError):
            error, result = f"it ended with exit code {self.ranks[n].process.wait()}", None
        if error is None:
            results[n] = result
        else:
            errors[n] = error

    def _stacks(self, n: int) -> str:
        os.kill(self.ranks[n].process.pid, signal.SIGUSR1)
        time.sleep(GRACE_SECONDS)
        return self.ranks[n].stacks.read_text()

    def _start(self, number: int) -> _Rank:
        here, there = multiprocessing.Pipe()
        stacks = Path(tempfile.mkdtemp(), "stacks")
        with there:
            command = [sys.executable, "-m", "tests.rank_pool", str(number), str(there.fileno()), str(stacks)]
            process = popen(command, pass_fds=[there.fileno()], start_new_session=True)
        here.send(bytes(multiprocessing.current_process().authkey))
        return _Rank(process, here, stacks)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            rank.pipe.close()
            shutil.rmtree(rank.stacks.parent)
        self.ranks = []


@dataclass(frozen=True)
class Ranks:
    """The first ranks of a pool."""

    pool: RankPool
    num_ranks: int

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        __tracebackhide__ = True
        return self.pool.run(self.num_ranks, function, args)


def _describe(errors: dict[int, str]) -> str:
    """The last line of the cause first, then its traceback, then those of ranks that only lost a peer."""
    order = sorted(errors, key=lambda n: LOST_PEER.search(errors[n]) is not None)
    cause = errors[order[0]].strip().splitlines()[-1]
    return "\n".join([f"rank {order[0]}: {cause}", *(f"--- rank {n}\n{errors[n]}" for n in order)])


def main() -> None:
    rank, descriptor, stacks = sys.argv[1:]
    # Without stacks of C++ when a peer has gone: they say nothing of the cause.
    os.environ.update(RANK=rank, LOCAL_RANK=rank, MASTER_ADDR="localhost", TORCH_CPP_LOG_LEVEL="ERROR")
    with open(stacks, "w") as file, Connection(int(descriptor)) as pipe:
        faulthandler.register(signal.SIGUSR1, file)
        multiprocessing.current_process().authkey = pipe.recv()  # tensors come through shared memory of that key
        _answer(pipe)


def _answer(pipe: Connection) -> None:
    import torch

    from automodel_rl.compat.process_groups import clear_mesh_caches
    from automodel_rl.launch.process_group import leave_process_group
    from automodel_rl.launch.quiet import quiet_libraries
    from tests.faults import PLANTED, planted

    quiet_libraries()
    torch.set_num_threads(1)
    while True:
        try:
            function, args, num_ranks, port = pipe.recv()
        except EOFError:
            return
        os.environ.update(WORLD_SIZE=str(num_ranks), MASTER_PORT=str(port))
        try:
            with planted(os.environ.get(PLANTED)):
                result = function(*args)
            # Every gloo group has threads that wake up; over many tests they would add up.
            leave_process_group()
            clear_mesh_caches()
            gc.collect()
            sys.stdout.flush()
            pipe.send((None, result))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


if __name__ == "__main__":
    main()
