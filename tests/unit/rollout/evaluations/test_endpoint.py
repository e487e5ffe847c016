"""What harnesses ask becomes prompts: equal requests are sampled anew, and what does not fit is refused."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from automodel_rl.rollout.evaluations.endpoint import EvaluationEndpoint
from automodel_rl.rollout.sampled import Sampled, SampledSequence, SamplePrompt
from tests.unit.data.stock_templates import stock_tokenizer

TOKENIZER = stock_tokenizer("qwen3")


@pytest.fixture
def asked() -> list[SamplePrompt]:
    return []


@pytest.fixture
def endpoint(asked: list[SamplePrompt]) -> Iterator[EvaluationEndpoint]:
    """An endpoint whose prompts a thread answers, as a program does."""
    endpoint = EvaluationEndpoint(TOKENIZER, {0}, 40, seed=7)

    def answer() -> None:
        while (one := endpoint.asked.get()) is not None:
            asked.extend(one.prompts)
            sequence = SampledSequence([5, 6], [-1.0, -2.0], "stop")
            one.answers.set_result([Sampled([sequence], np.zeros(len(p.tokens), np.float32)) for p in one.prompts])

    threading.Thread(target=answer, daemon=True).start()
    yield endpoint
    endpoint.asked.put(None)  # type: ignore[arg-type]
    endpoint.close()


def post(endpoint: EvaluationEndpoint, path: str, **body: Any) -> Any:
    data = json.dumps({"model": "policy", **body}).encode()
    request = urllib.request.Request(f"{endpoint.url}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def test_equal_requests_without_a_seed_are_sampled_anew(
    endpoint: EvaluationEndpoint, asked: list[SamplePrompt]
) -> None:
    chat = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4}
    for _ in range(3):
        post(endpoint, "chat/completions", **chat)
    for _ in range(2):
        post(endpoint, "chat/completions", **chat, seed=3)
    post(endpoint, "completions", prompt=[[1, 2], [1, 2]], max_tokens=1)
    assert len({prompt.seed for prompt in asked[:3]}) == 3
    assert [prompt.seed for prompt in asked[3:5]] == [3, 3]
    assert asked[5].seed != asked[6].seed


def test_what_does_not_fit_is_refused_in_a_line(endpoint: EvaluationEndpoint) -> None:
    for body, why in (
        ({"prompt": [1] * 41, "max_tokens": 1}, "a prompt has 41 tokens, but only 40 fit with an answer"),
        ({"prompt": [99999], "max_tokens": 1}, "a prompt has token 99999"),
        ({"prompt": [], "max_tokens": 1}, "prompt: is empty"),
        ({"prompt": [1], "logit_bias": {"1": 5}}, "logit_bias is not supported"),
    ):
        found = post(endpoint, "completions", **body)
        assert found["status"] == 400
        assert why in found["error"]["message"]
