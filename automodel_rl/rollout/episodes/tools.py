"""Tools: functions that the model may call. What they return is answered, and so is what they raise."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from automodel_rl.errors import InputError, innermost
from automodel_rl.import_path import import_function
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

CUT = " ... "


def load_tools(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions at import paths, by their names.

    Raises:
        InputError: a path names no function, two functions have one name, or one has no type hints and docstring.
    """
    tools: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = import_function("rollout.tools", path)
        if function.__name__ in tools:
            raise InputError(f"rollout.tools: two tools are called {function.__name__}: rename one")
        try:
            get_json_schema(function)
        except Exception as error:
            raise InputError(
                f"rollout.tools={path}: its schema comes from type hints and a docstring with Args ({innermost(error)})"
            ) from None
        tools[function.__name__] = function
    return tools


class ToolEnvironment:
    """Runs the calls of each turn. An episode ends with a turn that calls nothing.

    Args:
        tools: the functions, by name.
        most_characters: longest answer; a longer one is cut in the middle.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]], most_characters: int):
        self.tools, self.most_characters = tools, most_characters

    def reset(self) -> Sequence[Message]:
        return ()

    def step(self, turn: Turn) -> Outcome:
        if turn.problem:
            return Outcome([{"role": "user", "content": turn.problem}], metrics={"malformed": 1.0})
        answers = [self._answer(call["name"], call["arguments"]) for call in turn.calls]
        messages = [
            {"role": "tool", "name": call["name"], "content": self._cut(answer)}
            for call, (answer, _) in zip(turn.calls, answers, strict=True)
        ]
        metrics = {"calls": float(len(answers)), "failed": float(sum(failed for _, failed in answers))}
        return Outcome(messages, done=not messages, metrics=metrics)

    def close(self) -> None:
        """Does nothing: functions hold nothing."""

    def _answer(self, name: str, arguments: Any) -> tuple[str, bool]:
        """What a call is answered, and whether it failed."""
        if name not in self.tools:
            return f"error: no tool is called {name}: use {' or '.join(self.tools)}", True
        if not isinstance(arguments, dict):
            return f"error: the arguments of {name} must be an object", True
        try:
            inspect.signature(self.tools[name]).bind(**arguments)
            found = self.tools[name](**arguments)
        except Exception as error:
            return f"error: {innermost(error)}", True
        return found if isinstance(found, str) else json.dumps(found, default=str), False

    def _cut(self, text: str) -> str:
        if len(text) <= self.most_characters:
            return text
        half = (self.most_characters - len(CUT)) // 2
        return text[:half] + CUT + text[-half:]
