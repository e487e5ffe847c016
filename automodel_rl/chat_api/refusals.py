"""Request keys that are not read: those without effect, those overridden, and those refused by name.

Clients send unsupported keys with values that have no effect. These are accepted; any other value is refused, as
ignoring it would change what is sampled. null counts as absent.
"""

from collections.abc import Collection, Mapping
from typing import Any

from automodel_rl.errors import InputError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's API
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
    # vLLM
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
    # keys of one request type that the other type does not serve
    "best_of": (1,),
    "echo": (False,),
    "top_logprobs": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "n": (1,),
}
"""Unsupported keys, with the values that have no effect."""

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
"""Keys that never affect sampling."""

OVERRIDDEN = ("temperature", "top_p", "top_k", "seed")
"""Sampling settings that the run decides."""

MAX_STOPS = 64
"""Maximum number of stop texts."""

DISABLE = "disable_parallel_tool_use"
"""Key of `tool_choice` that limits an answer to one call."""

FREE_CHOICES = ("auto", "none", "required", "any")
"""Values of `tool_choice` that name no tool."""


def is_neutral(key: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Whether an unsupported key, one of `NEUTRAL`, has a value without effect. `body` is the whole request."""
    neutral = (*NEUTRAL[key], body.get("n", 1)) if key == "best_of" else NEUTRAL[key]
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def refusal(key: str) -> str:
    shown = " or ".join(map(repr, NEUTRAL[key]))
    return f"{key} is not supported: remove it{f', or send {shown}' if shown else ''}"


def check_keys(body: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuses keys that would change an answer but are not served. `read` names the keys that the API reads.

    Raises:
        InputError: a key is unknown, or has a value that is not served.
    """
    if not isinstance(body, Mapping):
        raise InputError(f"the request is {body!r:.80}: send an object")
    for key, value in body.items():
        if value is None or key in IGNORED or key in OVERRIDDEN or key in read:
            continue
        if key not in NEUTRAL:
            raise InputError(f"{key} is not supported: remove it")
        if not is_neutral(key, value, body):
            raise InputError(refusal(key))
    kind = choice_of(body)
    if kind is not None and kind not in FREE_CHOICES:
        raise InputError(
            "tool_choice: required tool calls are not supported, because the model's own choice is trained"
        )


def choice_of(body: Mapping[str, Any]) -> Any:
    """Returns the request's tool choice: one of `FREE_CHOICES`, another value, or None."""
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, Mapping) else choice


def allows_parallel(body: Mapping[str, Any]) -> bool:
    """Whether an answer may have several calls, by either API's key. Raises InputError if the value is not a
    boolean."""
    choice = body.get("tool_choice")
    of_choice = choice.get(DISABLE) if isinstance(choice, Mapping) else None
    given = {"parallel_tool_calls": body.get("parallel_tool_calls"), f"tool_choice.{DISABLE}": of_choice}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{name}: is {value!r:.80}: send true or false")
    return body.get("parallel_tool_calls") is not False and not of_choice


def most_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """Returns the token limit under the first of the keys `names` that is present. Raises InputError if it is
    invalid."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    most = body[name]
    if not isinstance(most, int) or isinstance(most, bool) or not 0 < most < 2**31:
        raise InputError(f"{name}: is {most!r:.80}: send the maximum number of tokens")
    return most


def stop_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the stop texts under the key `name`. Raises InputError if they are not text or too many."""
    given = body.get(name)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(one, str) and one for one in texts):
        raise InputError(f"{name}: is {given!r:.80}: send a non-empty text, or at most {MAX_STOPS} of them")
    return tuple(texts)


def overridden(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request's sampling settings and tool choice that the run overrides."""
    found = {key: body[key] for key in OVERRIDDEN if body.get(key) is not None}
    kind = choice_of(body)
    return found | ({} if kind in (None, "auto", "none") else {"tool_choice": kind})
