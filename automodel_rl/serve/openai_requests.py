"""The JSON requests of OpenAI's API, and of vLLM's additions to it, checked.

A key that is served has a field here. Clients also send keys that are not served, in the value with which they change
nothing; that value is accepted, and any other is refused by the key's name, for ignoring it would change what is
sampled. null stands for a key that is left out.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from automodel_rl.serve.requests import Body, Seed, StopText, StopTexts, Temperature, Text, Token, TopK, TopP

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # of OpenAI's API
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # of vLLM
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (False,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # of either request, where the other has a field
    "best_of": (1,),
    "echo": (False,),
    "top_logprobs": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Keys that are not served, with the values that change nothing."""


class SamplingRequest(Body):
    """What both requests have."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: Text
    n: Annotated[int, Field(gt=0)] = 1
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    return_token_ids: bool = False
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_keys(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {key: value for key, value in given.items() if value is not None}
        for key in [key for key in asked if key in NEUTRAL and key not in cls.model_fields]:
            neutral = (*NEUTRAL[key], asked.get("n", 1)) if key == "best_of" else NEUTRAL[key]
            if not any(asked[key] == one and isinstance(asked[key], bool) == isinstance(one, bool) for one in neutral):
                shown = " or ".join(map(repr, neutral))
                raise ValueError(f"{key} is not served: leave it out{f', or give {shown}' if neutral else ''}")
            del asked[key]
        return asked


class CompletionRequest(SamplingRequest):
    prompt: str | list[Token] | list[str] | list[list[Token]]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 16
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: bool = False
    add_special_tokens: Literal[True] = True


class ChatRequest(SamplingRequest):
    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    logprobs: bool = False
    add_special_tokens: Literal[False] = False
