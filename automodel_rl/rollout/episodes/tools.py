"""Tools: functions that the model may call. Their results and errors are the answers."""

import inspect
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.utils import get_json_schema

from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.import_path import import_function
from automodel_rl.rollout.episodes.event_loop import awaited
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn
from automodel_rl.rollout.episodes.python_tool import run_python

PYTHON = "python"
"""Name of the built-in tool that runs code."""

FAILED, TIMED_OUT = "failed_calls", "timed_out_calls"


def load_tools(paths: Sequence[str], is_sandboxed: bool, seconds: float) -> dict[str, Callable[..., Any]]:
    """Imports functions, and returns them by name.

    Args:
        paths: import paths, or `python` for the built-in tool.
        is_sandboxed, seconds: settings of the built-in tool.

    Raises:
        InputError: a path names no function, two functions have one name, or one lacks type hints or a docstring.
    """
    tools: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = _python(is_sandboxed, seconds) if path == PYTHON else import_function("rollout.tools", path)
        if not callable(function):
            raise InputError(f"rollout.tools={path}: is not a function but {function!r:.60}: name a function")
        name = function.__name__
        if name in tools:
            raise InputError(f"rollout.tools: two tools are named {name}: rename one")
        try:
            get_json_schema(function)
        except Exception as error:
            raise InputError(
                f"rollout.tools={path}: its schema requires type hints and a docstring with Args "
                f"({describe_root_cause(error)})"
            ) from None
        tools[name] = function
    return tools


def schemas_of(tools: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    return [get_json_schema(function) for function in tools.values()]


def _python(is_sandboxed: bool, seconds: float) -> Callable[..., Any]:
    def python(code: str) -> str:
        """Runs Python code and returns what it prints.

        Args:
            code: The code to run.
        """
        return run_python(code, seconds, is_sandboxed)

    return python


class ToolEnvironment:
    """Runs the calls of each turn. A turn without calls ends the conversation. `seconds` limits Python code only."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]], seconds: float):
        self.tools, self.seconds = tools, seconds

    def reset(self) -> Sequence[Message]:
        return ()

    def step(self, turn: Turn) -> Outcome:
        answers = [self._answer(str(call["name"]), call["arguments"]) for call in turn.calls]
        messages = [
            {"role": "tool", "name": str(call["name"]), "content": answer}
            for call, (answer, _) in zip(turn.calls, answers, strict=True)
        ]
        problems = [problem for _, problem in answers]
        metrics = {name: float(problems.count(name)) for name in (FAILED, TIMED_OUT)}
        return Outcome(messages, done=not messages, metrics=metrics)

    def close(self) -> None:
        """Does nothing."""

    def _answer(self, name: str, arguments: Any) -> tuple[str, str]:
        """Returns the answer to a call, and the metric of its failure."""
        if name not in self.tools:
            return f"error: no tool is called {name}: use {' or '.join(self.tools)}", FAILED
        if not isinstance(arguments, dict):
            return f"error: the arguments of {name} must be an object", FAILED
        try:
            inspect.signature(self.tools[name]).bind(**arguments)
            with _time_limit(self.seconds):
                found = awaited(self.tools[name](**arguments))
        except TimeoutError:
            return f"error: {name} took longer than {self.seconds:g} s", TIMED_OUT
        except Exception as error:
            return f"error: {describe_root_cause(error)}", FAILED
        return found if isinstance(found, str) else json.dumps(found, default=str), ""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in Python code that takes too long. Works in the main thread only."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
