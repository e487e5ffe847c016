"""Interface of agents: the function that `rollout.agent` names, and its arguments.

Imports only the standard library, as every agent's process loads it.
"""

import math
import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MODEL = "policy"
"""Name of the model. Agents may send any other."""

REWARD = "reward"
"""Key of the reward in an agent's result."""

LOCAL = "127.0.0.1,localhost"
"""Hosts that bypass a proxy."""


@dataclass(frozen=True)
class AgentEndpoint:
    """Address and key with which an agent reaches the model. They are also in the environment variables of OpenAI's
    and Anthropic's clients, which therefore need no arguments, even in programs that the agent starts.

    Attributes:
        base_url: OpenAI's API, ending with `/v1`.
        key: this episode's key, for the header `Authorization: Bearer` or `X-API-Key`.
        url_with_key: like `base_url`, but contains the key, for programs that send a key of their own.
        model: any other name is accepted as well.
        seed: shared by all episodes of a prompt.
    """

    base_url: str
    key: str
    url_with_key: str
    model: str = MODEL
    seed: int = 0

    def set_environment(self) -> None:
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
    """The function that `rollout.agent` names; it may be async."""

    def __call__(
        self, endpoint: AgentEndpoint, example: dict[str, Any]
    ) -> "float | Mapping[str, Any] | Awaitable[float | Mapping[str, Any] | None] | None":
        """Runs one episode.

        Args:
            example: the record of the prompt, with the prompt's messages as `messages`.

        Returns:
            The reward; or a mapping with `reward` and further numbers, which become metrics; or None where other
            rewards judge the last answer.
        """
        ...


@dataclass(frozen=True)
class AgentResult:
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def checked_result(value: Any) -> AgentResult:
    """Converts an agent's return value to plain numbers. Raises TypeError unless all are finite."""
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
        raise TypeError(f"the agent returned {value!r:.80} for {what}, which is not a finite number")
    return number
