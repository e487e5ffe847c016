"""Validated requests of OpenAI's API and of vLLM's extensions.

Each served key is a field; `chat_api.refusals` handles the others.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from automodel_rl.chat_api.refusals import NEUTRAL, is_neutral, refusal
from automodel_rl.chat_api.values import Body, Seed, StopText, StopTexts, Temperature, Text, Token, TopK, TopP

MAX_TOP = 20
"""Maximum number of alternative tokens with log-probabilities per position."""

NumTop = Annotated[int, Field(ge=0, le=MAX_TOP)]


class StreamOptions(Body):
    """`include_usage` requests a final event with token counts."""

    include_usage: bool = False


class SamplingRequest(Body):
    """Fields common to both requests."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: Text
    n: Annotated[int, Field(gt=0)] = 1
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {key: value for key, value in given.items() if value is not None}
        for key in [key for key in asked if key in NEUTRAL and key not in cls.model_fields]:
            if not is_neutral(key, asked[key], asked):
                raise ValueError(refusal(key))
            del asked[key]
        return asked


class CompletionRequest(SamplingRequest):
    prompt: str | list[Token] | list[str] | list[list[Token]]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    logprobs: NumTop | None = None
    echo: bool = False
    add_special_tokens: Literal[True] = True


class ChatRequest(SamplingRequest):
    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: NumTop = 0
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    add_special_tokens: Literal[False] = False

    @model_validator(mode="after")
    def _has_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} without logprobs: set logprobs to true")
        return self
