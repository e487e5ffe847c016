"""Ranks that stay alive over many tests, for importing the package takes seconds a process; groups are made anew."""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from automodel_rl.launch.local import free_port

TIMEOUT_SECONDS = 300.0


class RankPool:
    """`pool.run(function, *args)` calls a module-level function on every rank and returns the results in rank order.

    A failing rank's traceback is what the test shows. The ranks are then ended, for their peers may be waiting inside a
    collective, and new ones start with the next test.
    """

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self._start()
        port = free_port()
        for pipe in self.pipes:
            pipe.send((function, args, port))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(results) < self.num_ranks:
            ready = wait([p for r, p in enumerate(self.pipes) if r not in results], max(0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise TimeoutError(f"ranks {sorted(set(range(self.num_ranks)) - set(results))} did not answer")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    error = f"rank {rank} died"
                if error is not None:
                    self.stop()
                    raise AssertionError(f"rank {rank} failed:\n{error}")
        return [results[rank] for rank in range(self.num_ranks)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.num_ranks), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def _serve(pipe: Connection, rank: int, num_ranks: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="localhost")
    import torch

    from automodel_rl.launch.process_group import leave_process_group
    from automodel_rl.launch.quiet import quiet_libraries

    quiet_libraries()
    torch.set_num_threads(1)
    while True:
        try:
            function, args, port = pipe.recv()
        except EOFError:
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            result = function(*args)
            # Every gloo group has threads that wake up; over many tests they would add up.
            leave_process_group()
            gc.collect()
            pipe.send((None, result))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
