"""Process that imports an environment or tools once, and forks a process for every conversation.

    python -m automodel_rl.rollout.episodes.environment_server DESCRIPTOR

The connection with that file descriptor delivers a `Setup`, answered by ((schemas of tools, warning), error), then
orders of a `ForkServer`. A conversation's process answers ("reset", None), ("step", Turn) and ("close", None) with
(value, error).
"""

import functools
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.import_path import import_function
from automodel_rl.rollout.episodes.fork_server import ForkServer
from automodel_rl.rollout.episodes.outcomes import checked_messages, checked_outcome, explain
from automodel_rl.rollout.episodes.protocol import Environment, EnvironmentFactory
from automodel_rl.rollout.episodes.python_tool import check_sandbox
from automodel_rl.rollout.episodes.tools import PYTHON, ToolEnvironment, load_tools, schemas_of


@dataclass(frozen=True)
class Setup:
    """Setup of the server.

    Attributes:
        environment: import path of a factory; None for tools.
        tools: import paths.
        tool_seconds: time limit of a call.
        sandbox: rollout.sandbox, the protection of the tool `python`.
        log: file for the environments' output.
    """

    environment: str | None
    tools: tuple[str, ...]
    tool_seconds: float
    sandbox: str
    log: str


def main() -> None:
    connection = Connection(int(sys.argv[-1]))
    setup: Setup = connection.recv()
    try:
        make, schemas, warning = _load(setup)
    except InputError as error:
        connection.send((None, str(error)))
        return
    serve = functools.partial(_serve_environment, make=make)
    ForkServer(connection, serve, setup.log).run(((schemas, warning), ""))


def _load(setup: Setup) -> tuple[EnvironmentFactory, list[dict[str, Any]], str]:
    if setup.environment is None:
        tools = load_tools(setup.tools, setup.sandbox != "none", setup.tool_seconds)
        warning = check_sandbox(setup.sandbox) if PYTHON in setup.tools else ""
        return (lambda example, seed: ToolEnvironment(tools, setup.tool_seconds)), schemas_of(tools), warning
    factory = import_function("rollout.environment", setup.environment)
    if not callable(factory):
        raise InputError(
            f"rollout.environment={setup.environment}: is not a function but {factory!r:.60}: name a factory"
        )
    schemas = [dict(schema) for schema in vars(factory).get("tools", ())]
    if not all(isinstance(schema.get("function"), dict) and "name" in schema["function"] for schema in schemas):
        raise InputError(
            f"rollout.environment={setup.environment}: its tools must be JSON schemas with a function and its name: "
            "make them with transformers.utils.get_json_schema"
        )
    return factory, schemas, ""


def _serve_environment(connection: Connection, make: EnvironmentFactory) -> None:
    example, seed = connection.recv()
    environment: Environment | None = None
    error = ""
    try:
        environment = make(example, seed)
    except Exception as problem:
        error = explain(problem)
    while True:
        name, turn = connection.recv()
        if environment is None:
            connection.send((None, error))
            continue
        try:
            match name:
                case "reset":
                    answer: Any = checked_messages(environment.reset(), "reset")
                case "step":
                    answer = checked_outcome(environment.step(turn))
                case _:
                    environment.close()
                    return
        except Exception as problem:
            connection.send((None, explain(problem)))
        else:
            connection.send((answer, ""))


if __name__ == "__main__":
    main()
