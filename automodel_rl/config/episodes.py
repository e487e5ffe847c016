"""Conversations of several turns: what answers the model, and when a conversation ends at the latest."""

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
"""Keys that mean nothing for completions of one turn."""

NOT_WITH_AGENT = ("max_tool_tokens", "tool_seconds", "on_bad_call", "sandbox")
"""Keys of what an agent does itself."""

AGENT_SECONDS = 600.0
"""Seconds after which an agent is ended, if the config does not say."""


class VerifiersConfig(Section):
    """Tasks of the package verifiers, whose agents are trained."""

    taskset: str
    """Name of the taskset: an installed package, or a module in the folder where the run starts."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the taskset."""

    harness: str | None = "null"
    """Name of the harness: the program that plays. null (the text): a chat with the tools of the task. None: the
    taskset's own."""

    python: str
    """Interpreter of an environment with verifiers 0.4 or later."""


class EpisodeConfig(Section):
    """The keys of `rollout` for conversations of several turns."""

    tools: tuple[str, ...] = ()
    """Functions that the model may call, as import paths `package.module:function`. Their schemas come from type hints
    and docstrings. What a call returns, or why it fails, is answered, and the model goes on. `python` is built in: it
    runs code in a sandbox."""

    environment: str | None = None
    """Import path `package.module:factory` of an environment that answers the model's turns, called as factory(example:
    dict, seed: int). Every conversation has one of its own, in a process of its own."""

    agent: str | None = None
    """Import path `package.module:function` of an agent: any program that calls the model by an endpoint beside the
    run, with OpenAI's or Anthropic's API. Called as function(endpoint, example: dict), plain or async, in a process of
    its own; it returns the episode's reward, or a dict with `reward` and other numbers."""

    verifiers: VerifiersConfig | None = None
    """Agents of the package verifiers, in place of `agent`. Prompts have the number of their task as `task`;
    `automodel-rl tasks` writes them."""

    agent_failed: Literal["leave_out"] | Annotated[float, Field(allow_inf_nan=False)] = "leave_out"
    """Reward of an episode whose agent raises, or is ended after `episode_seconds`; its turns are trained. leave_out:
    it leaves its group, and the others are compared without it."""

    agent_host: str = "127.0.0.1"
    """Address where the endpoint of agents listens. Another one than this machine's own lets programs in containers or
    on other machines call it, with the key of an episode."""

    max_turns: Positive = 8
    """Most turns of the model in a conversation, each of at most max_new_tokens. For an agent: most calls."""

    max_tokens: Positive | None = None
    """Most tokens of a conversation after its prompt, answers included. null: max_turns times max_new_tokens. For an
    agent: of each row, where its history forks."""

    max_tool_tokens: Positive = 1024
    """Most tokens of an answer. A longer one is cut in the middle."""

    tool_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Most seconds of a call. A tool that takes longer is answered as failed. An environment that takes longer is
    ended, and its conversation leaves its group."""

    episode_seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which no further turn of a conversation begins; null for no limit. An agent is ended after them,
    with all that it has started; null: after 600."""

    max_episodes: Positive = 256
    """Most conversations for each rank that are under way at once, and so most processes of environments or agents.
    They run on the machine of the first rank."""

    on_bad_call: Literal["answer", "end"] = "answer"
    """What happens if a turn has a call that cannot be read. answer: the model is told, and goes on. end: the
    conversation ends."""

    sandbox: Literal["strict", "auto", "none"] = "auto"
    """Protection for the tool `python`. auto: namespaces of its own with read-only files and without a network, and
    limits on memory, time, processes and files. The run does not start where the system refuses namespaces; what else
    it refuses is said at the start. strict: the run does not start where anything is refused. none: only limits on
    memory, time and files."""

    @property
    def has_turns(self) -> bool:
        """Whether completions are conversations of several turns."""
        return bool(self.tools) or self.environment is not None or self.has_agent

    @property
    def has_agent(self) -> bool:
        """Whether agents lead conversations."""
        return self.agent is not None or self.verifiers is not None

    @property
    def agent_seconds(self) -> float:
        """Seconds after which an agent is ended."""
        return AGENT_SECONDS if self.episode_seconds is None else self.episode_seconds

    @model_validator(mode="after")
    def _turns(self) -> "EpisodeConfig":
        if self.tools and self.environment is not None:
            raise ValueError(
                f"environment={self.environment} with tools={list(self.tools)}: an environment brings its own tools: "
                "give one of the two"
            )
        if self.has_agent:
            self._check_agent()
        if self.has_turns:
            return self
        fields = type(self).model_fields
        idle = next((key for key in ONLY_WITH_TURNS if getattr(self, key) != fields[key].default), None)
        if idle is not None:
            raise ValueError(
                f"{idle}={getattr(self, idle)} is for conversations of several turns: give tools, an environment or an "
                "agent"
            )
        return self

    def _check_agent(self) -> None:
        fields = type(self).model_fields
        others = {"tools": self.tools, "environment": self.environment}
        given = next((key for key, value in others.items() if value), None)
        if given is not None:
            raise ValueError(
                f"agent={self.agent} with {given}={others[given]}: an agent has its own: leave {given} out"
            )
        idle = next((key for key in NOT_WITH_AGENT if getattr(self, key) != fields[key].default), None)
        if idle is not None:
            raise ValueError(
                f"{idle}={getattr(self, idle)} with agent={self.agent}: the agent decides it: leave it out"
            )
