"""The interface of agents: what `rollout.agent` names, and what it gets.

This file imports only the standard library, for every process of an agent loads it.
"""

import math
import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MODEL = "policy"
"""The name of the model. Agents may send any other."""

REWARD = "reward"
"""The key of the reward in what an agent returns."""

LOCAL = "127.0.0.1,localhost"
"""Hosts that are reached without a proxy."""


@dataclass(frozen=True)
class AgentEndpoint:
    """The place where an agent finds the model. The environment variables of OpenAI's and Anthropic's clients say the
    same, so that a client made without arguments finds it, and any program that the agent starts.

    Attributes:
        base_url: the URL of OpenAI's API, ending with `/v1`.
        key: the key of this episode, for the header `Authorization: Bearer` or `X-API-Key`.
        url_with_key: a URL like `base_url` that needs no key, for programs that send a key of their own.
        model: a name of the model; any other is taken as well.
        seed: a seed that all episodes of a prompt share.
    """

    base_url: str
    key: str
    url_with_key: str
    model: str = MODEL
    seed: int = 0

    def set_environment(self) -> None:
        """Sets environment variables of this process."""
        os.environ |= {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.key,
        }
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOCAL)))


class Agent(Protocol):
    """What `rollout.agent` names: a function, which may be async."""

    def __call__(
        self, endpoint: AgentEndpoint, example: dict[str, Any]
    ) -> "float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any] | None] | None":
        """Does one episode.

        Args:
            endpoint: where the model is.
            example: the record of the prompt, with the prompt's messages as `messages`.

        Returns:
            The reward; or a mapping with `reward` and further numbers, which become metrics; or None where other
            rewards judge the last answer.
        """
        ...


@dataclass(frozen=True)
class AgentResult:
    """What an agent returned: its reward, None if it gave none, and its metrics."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def checked_result(value: Any) -> AgentResult:
    """What an agent returned, as plain numbers.

    Args:
        value: what it returned.

    Raises:
        TypeError: it is no reward, or has something that is no finite number.
    """
    if value is None:
        return AgentResult(None)
    if not isinstance(value, Mapping):
        return AgentResult(_number(value, "the reward"))
    reward = value.get(REWARD)
    metrics = {str(name): _number(number, str(name)) for name, number in value.items() if name != REWARD}
    return AgentResult(None if reward is None else _number(reward, "the reward"), metrics)


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise TypeError(f"the agent returned {value!r:.80} for {what}, which is no finite number")
    return number
