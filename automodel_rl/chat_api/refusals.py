"""Keys of requests that are not read: which change nothing, which are overridden, and which are refused by their name.

Clients send keys that are not served, in the value with which they change nothing; that value is accepted, and any
other is refused, for ignoring it would change what is sampled. null stands for a key that is left out.
"""

from collections.abc import Collection, Mapping
from typing import Any

from automodel_rl.errors import InputError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # of OpenAI's API
    "audio": (),
    "background": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
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
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled", "auto"),
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
    "n": (1,),
}
"""Keys that are not served, with the values that change nothing."""

IGNORED = frozenset(
    (
        "model",
        "user",
        "metadata",
        "store",
        "include",
        "reasoning",
        "reasoning_effort",
        "verbosity",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "context_management",
    )
)
"""Keys that change nothing about what is sampled, whatever they say."""

OVERRIDDEN = ("temperature", "top_p", "top_k", "seed")
"""Settings of sampling that a run decides."""

MOST_STOPS = 64
"""Most texts that end an answer."""

DISABLE = "disable_parallel_tool_use"
"""The key of `tool_choice` that allows one call in an answer."""

FREE_CHOICES = ("auto", "none", "required", "any")
"""Values of `tool_choice` that name no tool."""


def is_neutral(key: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Whether a key that is not served has a value that changes nothing.

    Args:
        key: a key of `NEUTRAL`.
        value: its value.
        body: the whole request.
    """
    neutral = (*NEUTRAL[key], body.get("n", 1)) if key == "best_of" else NEUTRAL[key]
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def refusal(key: str) -> str:
    """What is said of a key that is not served."""
    shown = " or ".join(map(repr, NEUTRAL[key]))
    return f"{key} is not served: leave it out{f', or give {shown}' if shown else ''}"


def check_keys(body: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuses what would change an answer and is not served.

    Args:
        body: the request's JSON.
        read: the keys that its API reads.

    Raises:
        InputError: a key is unknown, or has a value that is not served.
    """
    if not isinstance(body, Mapping):
        raise InputError(f"the request is {body!r:.80}: send an object")
    for key, value in body.items():
        if value is None or key in IGNORED or key in OVERRIDDEN or key in read:
            continue
        if key not in NEUTRAL:
            raise InputError(f"{key} is not served: leave it out")
        if not is_neutral(key, value, body):
            raise InputError(refusal(key))
    kind = choice_of(body)
    if kind is not None and kind not in FREE_CHOICES:
        raise InputError("tool_choice: a tool that must be called is not served, for the model's own choice is trained")


def choice_of(body: Mapping[str, Any]) -> Any:
    """What a request says of the choice of a tool: one of `FREE_CHOICES`, something else, or None."""
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, Mapping) else choice


def allows_parallel(body: Mapping[str, Any]) -> bool:
    """Whether an answer may have several calls, by the key of either API.

    Args:
        body: the request's JSON.

    Raises:
        InputError: it is neither true nor false.
    """
    choice = body.get("tool_choice")
    of_choice = choice.get(DISABLE) if isinstance(choice, Mapping) else None
    given = {"parallel_tool_calls": body.get("parallel_tool_calls"), f"tool_choice.{DISABLE}": of_choice}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{name}: is {value!r:.80}: send true or false")
    return body.get("parallel_tool_calls") is not False and not of_choice


def most_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """The most tokens of an answer, by the first of some keys; None if none is there.

    Args:
        body: the request's JSON.
        names: the keys.

    Raises:
        InputError: it is no number of tokens.
    """
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    most = body[name]
    if not isinstance(most, int) or isinstance(most, bool) or not 0 < most < 2**31:
        raise InputError(f"{name}: is {most!r:.80}: send the most tokens of the answer")
    return most


def stop_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The texts that end an answer.

    Args:
        body: the request's JSON.
        name: the key.

    Raises:
        InputError: they are no texts, or too many.
    """
    given = body.get(name)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or len(texts) > MOST_STOPS or not all(isinstance(one, str) and one for one in texts):
        raise InputError(f"{name}: is {given!r:.80}: send a text that is not empty, or at most {MOST_STOPS}")
    return tuple(texts)


def overridden(body: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a request that a run decides in its place.

    Args:
        body: the request's JSON.
    """
    found = {key: body[key] for key in OVERRIDDEN if body.get(key) is not None}
    kind = choice_of(body)
    return found | ({} if kind in (None, "auto", "none") else {"tool_choice": kind})
