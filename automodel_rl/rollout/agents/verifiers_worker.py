"""Runs episodes of verifiers (Prime Intellect), version 0.4 or later, in an interpreter that has that package.

    PYTHON verifiers_worker.py DESCRIPTOR               serves a run
    PYTHON verifiers_worker.py --tasks TASKSET [JSON]   writes a taskset's tasks as prompts, one JSON per line

Loaded by its path, so it imports only the standard library and verifiers. The connection with the descriptor delivers
a setup (`VerifiersSetup` as a dict), answered by (number of tasks, error), then orders: ("begin", number, task, base
URL, key) and ("end", number). An episode sends (number, reward, metrics, error).
"""

import asyncio
import itertools
import json
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

MAX_TASKS = 1_000_000
"""Most tasks read from a taskset: some are endless."""


def environment_of(setup: dict[str, Any]) -> Any:
    """Creates the environment of a setup. Its agents run on this machine, as the run's endpoint may not be reachable
    from others."""
    agent = {"runtime": {"type": "subprocess"}, "max_turns": setup["max_turns"]}
    if setup["harness"]:
        agent["harness"] = {"id": setup["harness"]}
    given = {"taskset": {"id": setup["taskset"], **setup["args"]}, "agent": agent}
    return load_environment(resolve_env_config(given))


class Worker:
    def __init__(self, connection: Connection, environment: Any, tasks: list[Any]):
        self.connection, self.environment, self.tasks = connection, environment, tasks
        self.running: dict[int, asyncio.Task[None]] = {}
        self.ended = asyncio.Event()

    async def serve(self) -> None:
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self._take_order)
        async with self.environment.serving():
            await self.ended.wait()
            for task in self.running.values():
                task.cancel()
            await asyncio.gather(*self.running.values(), return_exceptions=True)

    def _take_order(self) -> None:
        try:
            order, number, *given = self.connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            self.ended.set()
            return
        if order == "begin":
            task = asyncio.ensure_future(self._run(number, *given))
            self.running[number] = task
            task.add_done_callback(lambda _: self.running.pop(number, None))
        elif number in self.running:
            self.running[number].cancel()

    async def _run(self, number: int, task: int, base_url: str, key: str) -> None:
        variable = f"AUTOMODEL_RL_KEY_{number}"
        os.environ[variable] = key
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            episode = await self.environment.run_episode(self.tasks[task], ModelContext("policy", client))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.connection.send((number, None, {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        else:
            self.connection.send((number, *result_of(episode)))
        finally:
            del os.environ[variable]


def result_of(episode: Any) -> tuple[float | None, dict[str, float], str]:
    """Returns reward, metrics and error of an episode. The first of its agents is the trained one."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.traces:
        first = errors[0] if errors else None
        return None, {}, f"{first.type}: {' '.join(first.message.split())[:200]}" if first else "no agent ran"
    trace = episode.traces[0]
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return float(trace.reward), metrics, ""


def write_tasks(taskset: str, args: dict[str, Any]) -> None:
    environment = environment_of({"taskset": taskset, "args": args, "harness": "null", "max_turns": None})
    for number, task in enumerate(itertools.islice(environment.taskset, MAX_TASKS)):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else " ".join(str(message.content) for message in prompt or [])
        print(json.dumps({"prompt": text or "Begin.", "task": number}))


def main() -> None:
    if sys.argv[1] == "--tasks":
        write_tasks(sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
        return
    connection = Connection(int(sys.argv[-1]))
    setup = connection.recv()
    try:
        environment = environment_of(setup)
        tasks = [*itertools.islice(environment.taskset, MAX_TASKS)]
    except Exception as error:
        connection.send((0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        return
    connection.send((len(tasks), ""))
    asyncio.run(Worker(connection, environment, tasks).serve())


if __name__ == "__main__":
    main()
