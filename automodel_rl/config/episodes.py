"""Conversations of several turns: tools, environments and agents, and their limits."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Positive, Section

ONLY_WITH_TURNS = (
    "max_turns",
    "max_tokens",
    "max_tool_tokens",
    "tool_seconds",
    "episode_seconds",
    "max_episodes",
    "on_bad_call",
    "sandbox",
    "agent_failed",
    "agent_host",
)
"""Keys without effect for single-turn completions."""

NOT_WITH_AGENT = ("max_tool_tokens", "tool_seconds", "on_bad_call", "sandbox")
"""Keys for what an agent does itself."""

AGENT_SECONDS = 600.0
"""Default time limit of an agent in seconds."""


class VerifiersConfig(Section):
    """Agents and tasks of the package verifiers."""

    taskset: str
    """Name of the taskset: an installed package, or a module in the working directory."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the taskset."""

    harness: str | None = "null"
    """Name of the harness, the program that runs the agent. "null" (the string) is a chat with the task's tools. null:
    the taskset's own harness."""

    python: str
    """Python interpreter of an environment with verifiers 0.4 or later."""


class EpisodeConfig(Section):
    """The keys of `rollout` for conversations of several turns."""

    tools: tuple[str, ...] = ()
    """Functions that the model may call, as import paths `package.module:function`. Their schemas come from type hints
    and docstrings. The result of a call, or its error, is returned to the model. The built-in `python` runs code in a
    sandbox."""

    environment: str | None = None
    """Import path `package.module:factory` of an environment that responds to the model's turns, called as
    factory(example: dict, seed: int). Every conversation has its own environment in a separate process."""

    agent: str | None = None
    """Import path `package.module:function` of an agent: any program that calls the model through a local endpoint with
    OpenAI's or Anthropic's API. Called as function(endpoint, example: dict), plain or async, in a separate process;
    returns the episode's reward, or a dict with `reward` and further metrics."""

    verifiers: VerifiersConfig | None = None
    """Agents of the package verifiers, in place of `agent`. Each prompt holds its task number as `task`; `automodel-rl
    tasks` writes such prompts."""

    agent_failed: Literal["leave_out"] | Annotated[float, Field(allow_inf_nan=False)] = "leave_out"
    """Reward of an episode whose agent raises or exceeds `episode_seconds`; its turns are trained. leave_out: the
    episode is removed from its group."""

    agent_host: str = "127.0.0.1"
    """Address on which the agents' endpoint listens. Set a non-loopback address for agents in containers or on other
    machines, which authenticate with their episode's key."""

    max_turns: Positive = 8
    """Maximum turns of the model in a conversation, each of at most max_new_tokens. With an agent: maximum calls."""

    max_tokens: Positive | None = None
    """Maximum tokens of a conversation after its prompt, tool and environment messages included. null: max_turns times
    max_new_tokens. With an agent: the limit of each row, since its history may branch."""

    max_tool_tokens: Positive = 1024
    """Maximum tokens of a tool or environment message. Longer ones are cut in the middle."""

    tool_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of a call in seconds. A tool that exceeds it is reported to the model as failed. An environment that
    exceeds it is terminated, and its conversation is removed from its group."""

    episode_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time limit of a conversation in seconds, after which no new turn begins; null: no limit. An agent is terminated
    at the limit together with its child processes; null: after 600 seconds."""

    max_episodes: Positive = 256
    """Maximum concurrent conversations per rank, and hence processes of environments or agents. All run on the machine
    of the first rank."""

    on_bad_call: Literal["answer", "end"] = "answer"
    """Handling of a turn with a tool call that cannot be parsed. answer: the error is returned to the model. end: the
    conversation ends."""

    sandbox: Literal["strict", "auto", "none"] = "auto"
    """Isolation of the tool `python`. auto: separate namespaces with a read-only file system and no network, and limits
    on memory, time, processes and files; the run fails to start if the system does not support namespaces, and reports
    any other missing protection. strict: the run fails to start if any protection is missing. none: only limits on
    memory, time and files."""

    @property
    def has_turns(self) -> bool:
        """Whether completions are conversations of several turns."""
        return bool(self.tools) or self.environment is not None or self.has_agent

    @property
    def has_agent(self) -> bool:
        """Whether agents run the conversations."""
        return self.agent is not None or self.verifiers is not None

    @property
    def agent_seconds(self) -> float:
        """Time limit of an agent in seconds."""
        return AGENT_SECONDS if self.episode_seconds is None else self.episode_seconds

    @model_validator(mode="after")
    def _turns(self) -> "EpisodeConfig":
        if self.tools and self.environment is not None:
            raise ValueError(
                f"environment={self.environment} with tools={list(self.tools)}: an environment has its own tools: set "
                "only one of them"
            )
        if self.has_agent:
            self._check_agent()
        if self.has_turns:
            return self
        fields = type(self).model_fields
        idle = next((key for key in ONLY_WITH_TURNS if getattr(self, key) != fields[key].default), None)
        if idle is not None:
            raise ValueError(
                f"{idle}={getattr(self, idle)} is for multi-turn conversations: set tools, an environment or an agent"
            )
        return self

    def _check_agent(self) -> None:
        fields = type(self).model_fields
        others = {"tools": self.tools, "environment": self.environment}
        given = next((key for key, value in others.items() if value), None)
        if given is not None:
            raise ValueError(f"agent={self.agent} with {given}={others[given]}: an agent has its own: remove {given}")
        idle = next((key for key in NOT_WITH_AGENT if getattr(self, key) != fields[key].default), None)
        if idle is not None:
            raise ValueError(f"{idle}={getattr(self, idle)} with agent={self.agent}: the agent decides this: remove it")
