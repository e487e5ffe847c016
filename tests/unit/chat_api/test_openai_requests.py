"""Keys of OpenAI's requests: those of the installed client are all known, with the value that changes nothing."""

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from automodel_rl.chat_api.openai_requests import ChatRequest, CompletionRequest, SamplingRequest
from automodel_rl.chat_api.refusals import NEUTRAL

PAIRS = (
    (completion_create_params.CompletionCreateParamsNonStreaming, CompletionRequest),
    (chat_create_params.CompletionCreateParamsNonStreaming, ChatRequest),
)
BODIES: tuple[tuple[type[SamplingRequest], dict[str, Any]], ...] = (
    (CompletionRequest, {"model": "base", "prompt": [1]}),
    (ChatRequest, {"model": "base", "messages": [{"role": "user", "content": "a"}]}),
)


@pytest.mark.parametrize(("params", "request_type"), PAIRS)
def test_every_key_of_the_installed_client_is_known(params: Any, request_type: type[SamplingRequest]) -> None:
    assert {*get_type_hints(params)} - request_type.model_fields.keys() - NEUTRAL.keys() == set()


@pytest.mark.parametrize(("request_type", "body"), BODIES)
def test_values_that_change_nothing_are_accepted_and_others_refused_by_name(
    request_type: type[SamplingRequest], body: dict[str, Any]
) -> None:
    plain = request_type.model_validate(body)
    for key, values in NEUTRAL.items():
        for value in (None, *values):
            if key not in request_type.model_fields:
                assert request_type.model_validate({**body, key: value}) == plain, (key, value)
        for value in (7, "other", {"a": 1}, ["a"]) if key not in request_type.model_fields else ():
            with pytest.raises(ValidationError, match=key):
                request_type.model_validate({**body, key: value})
    with pytest.raises(ValidationError, match="min_p is not supported: remove it, or send 0"):
        request_type.model_validate({**body, "min_p": 0.1})
    with pytest.raises(ValidationError, match="unheard_of"):
        request_type.model_validate({**body, "unheard_of": 0})
    assert request_type.model_validate({**body, "n": 3, "best_of": 3}).n == 3
    nulls = dict.fromkeys(request_type.model_fields.keys() - body.keys())
    assert request_type.model_validate({**body, **nulls}) == plain
