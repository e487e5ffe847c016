"""Adapters that make environments of other systems usable as `rollout.environment`.

# my_module.py, for rollout.environment: my_module:make
from automodel_rl.rollout.episodes.adapters import from_trl
make = from_trl(MyEnvironment)
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from automodel_rl.rollout.episodes.event_loop import awaited
from automodel_rl.rollout.episodes.protocol import Environment, EnvironmentFactory, Message, Outcome, Turn
from automodel_rl.rollout.episodes.tools import ToolEnvironment

TOOL_SECONDS = 1e6
"""Time limit of a call in an environment; each step has the run's own limit."""

NOT_TOOLS = ("reset", "get_reward")


def from_trl(factory: Callable[[], Any]) -> EnvironmentFactory:
    """Adapts an `environment_factory` of TRL, whose public methods are tools.

    `reset` receives the record's columns; a text that it returns is appended to the user's last message. The final
    reward is that of `get_reward` after the last turn, if this method exists. It is called after every turn, so it
    must depend on the environment's state alone.

    Args:
        factory: the class, or a function that creates an instance. It is called once at the start, for the
            schemas.
    """

    def make(example: dict[str, Any], seed: int) -> Environment:
        return _TrlEnvironment(factory(), example)

    vars(make)["tools"] = [get_json_schema(tool) for tool in _tools_of(factory()).values()]
    return make


class _TrlEnvironment:
    def __init__(self, inner: Any, example: Mapping[str, Any]):
        self.inner, self.example, self.told = inner, example, 0.0
        self.tools = ToolEnvironment(_tools_of(inner), TOOL_SECONDS)

    def reset(self) -> Sequence[Message]:
        text = awaited(self.inner.reset(**self.example))
        return [] if text is None else [{"role": "user", "content": text}]

    def step(self, turn: Turn) -> Outcome:
        outcome = self.tools.step(turn)
        methods = _methods_of(self.inner)
        if "get_reward" not in methods:
            return outcome
        before, self.told = self.told, float(awaited(methods["get_reward"]()))
        return Outcome(outcome.messages, outcome.done, self.told - before, outcome.metrics)

    def close(self) -> None:
        """Does nothing."""


def _tools_of(inner: Any) -> dict[str, Callable[..., Any]]:
    methods = _methods_of(inner)
    return {name: method for name, method in methods.items() if not name.startswith("_") and name not in NOT_TOOLS}


def _methods_of(inner: Any) -> dict[str, Callable[..., Any]]:
    """Returns methods of an instance by name, found through its class, so that properties are not evaluated."""
    return {name: function.__get__(inner) for name, function in inspect.getmembers(type(inner), inspect.isfunction)}


def from_skyrl_gym(factory: Callable[[dict[str, Any]], Any]) -> EnvironmentFactory:
    """Adapts text environments of SkyRL-gym. `factory` creates a `BaseTextEnv` from the record."""

    def make(example: dict[str, Any], seed: int) -> Environment:
        return _SkyRLEnvironment(factory(example), example["messages"])

    return make


class _SkyRLEnvironment:
    def __init__(self, inner: Any, prompt: Sequence[Message]):
        self.inner, self.prompt = inner, prompt

    def reset(self) -> Sequence[Message]:
        messages, _ = self.inner.init([dict(message) for message in self.prompt])
        return _new_messages(messages, self.prompt)

    def step(self, turn: Turn) -> Outcome:
        found = self.inner.step(turn.text)
        action = found.get("postprocessed_action")
        if action is not None and action != turn.text:
            raise ValueError("the environment changes the model's text, but tokens are trained as they were sampled")
        metrics = self.inner.get_metrics() if found["done"] else {}
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        return Outcome(found["observations"], found["done"], found["reward"], numbers)

    def close(self) -> None:
        self.inner.close()


def from_tinker(factory: Callable[[dict[str, Any]], Any], tools: Sequence[dict[str, Any]] = ()) -> EnvironmentFactory:
    """Adapts message environments of tinker-cookbook.

    Args:
        factory: creates a `MessageEnv` from the record. Its conversation must begin with the record's prompt.
        tools: JSON schemas of its tools.
    """

    def make(example: dict[str, Any], seed: int) -> Environment:
        return _TinkerEnvironment(factory(example), example["messages"])

    vars(make)["tools"] = list(tools)
    return make


class _TinkerEnvironment:
    def __init__(self, inner: Any, prompt: Sequence[Message]):
        self.inner, self.so_far = inner, list(prompt)

    def reset(self) -> Sequence[Message]:
        return self._after(awaited(self.inner.initial_observation()))

    def step(self, turn: Turn) -> Outcome:
        message: Message = {"role": "assistant", "content": turn.content if turn.calls else turn.text}
        if turn.calls:
            message["tool_calls"] = _tinker_calls(turn.calls)
        self.so_far.append(message)
        found = awaited(self.inner.step(message))
        messages = [] if found.episode_done else self._after(found.next_messages)
        return Outcome(messages, found.episode_done, found.reward, found.metrics)

    def close(self) -> None:
        """Does nothing."""

    def _after(self, messages: Sequence[Message]) -> list[Message]:
        new = _new_messages(messages, self.so_far)
        self.so_far += new
        return new


def _tinker_calls(calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    from tinker_cookbook.renderers.base import ToolCall

    return [
        ToolCall.model_validate(
            {
                "id": f"call{number}",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
        )
        for number, call in enumerate(calls)
    ]


def _new_messages(messages: Sequence[Any], known: Sequence[Message]) -> list[Message]:
    """Returns the messages after the known ones. Raises ValueError if they do not begin with these."""
    begun = [(message["role"], message["content"]) for message in messages[: len(known)]]
    if begun != [(message["role"], message["content"]) for message in known]:
        raise ValueError(
            "the environment's conversation does not begin with the prompt and the turns so far: set the record's "
            "prompt to its first messages"
        )
    return [dict(message) for message in messages[len(known) :]]
