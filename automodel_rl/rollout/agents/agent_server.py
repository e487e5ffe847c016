"""Process that imports an agent once, and forks a process for every episode.

    python -m automodel_rl.rollout.agents.agent_server DESCRIPTOR

The connection with that file descriptor delivers an `AgentSetup`, answered by (None, error), then orders of a
`ForkServer`. An episode's process receives (endpoint, example), and sends (result, error).
"""

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.import_path import import_function
from automodel_rl.rollout.agents.protocol import Agent, AgentEndpoint, checked_result
from automodel_rl.rollout.episodes.fork_server import ForkServer
from automodel_rl.rollout.episodes.outcomes import explain


@dataclass(frozen=True)
class AgentSetup:
    """Import path of the agent, and file for the agents' output."""

    agent: str
    log: str


def main() -> None:
    connection = Connection(int(sys.argv[-1]))
    setup: AgentSetup = connection.recv()
    try:
        agent = import_function("rollout.agent", setup.agent)
        if not callable(agent):
            raise InputError(f"rollout.agent={setup.agent}: is not a function but {agent!r:.60}: name a function")
        inspect.signature(agent).bind("endpoint", "example")
    except InputError as error:
        connection.send((None, str(error)))
        return
    except (TypeError, ValueError) as error:
        text = f"rollout.agent={setup.agent}: cannot be called as function(endpoint, example) ({error})"
        connection.send((None, f"{text}: use a function of these two arguments"))
        return
    ForkServer(connection, functools.partial(_run, agent=agent), setup.log).run((None, ""))


def _run(connection: Connection, agent: Agent) -> None:
    endpoint: AgentEndpoint
    endpoint, example = connection.recv()
    endpoint.set_environment()
    try:
        returned: Any = agent(endpoint, example)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        result = checked_result(returned)
    except Exception as problem:
        connection.send((None, explain(problem)))
    else:
        connection.send((result, ""))


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


if __name__ == "__main__":
    main()
