"""The service's endpoint for OpenAI's API, with its real client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.services import Service, datum, of_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)

CHAT: list[Any] = [{"role": "user", "content": "1 + 2 is"}]


@pytest.fixture(name="client")
def make_client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client:
        yield client


def plain_logprobs(model: str, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """The log-probability of each token after the first, by plain transformers."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = plain(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_completions_are_those_of_the_model(service: Service, client: openai.OpenAI) -> None:
    prompts = [[5, 6, 7, 8], [20, 30]]
    asked = {
        "model": service.model,
        "max_tokens": 6,
        "logprobs": 0,
        "seed": 3,
        "extra_body": {"return_token_ids": True},
    }
    found = client.completions.create(prompt=prompts, n=2, temperature=0.7, **asked)
    assert len(found.choices) == 4
    for place, choice in enumerate(found.choices):
        prompt, tokens = prompts[place // 2], choice.token_ids  # type: ignore[attr-defined]
        assert choice.prompt_token_ids == prompt  # type: ignore[attr-defined]
        expected = plain_logprobs(service.model, prompt + tokens, 0.7)[len(prompt) - 1 :]
        assert choice.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=1e-6)
        assert choice.finish_reason == ("stop" if tokens[-1] == 2 else "length")
    assert found.choices[0].token_ids != found.choices[1].token_ids  # type: ignore[attr-defined]
    assert found.usage.prompt_tokens == 2 * 1 + 4 * 1
    (again,) = client.completions.create(prompt=prompts[0], temperature=0.7, **asked).choices
    assert again.token_ids == found.choices[0].token_ids  # type: ignore[attr-defined]
    (echoed,) = client.completions.create(prompt=prompts[0], echo=True, **asked).choices
    values = echoed.logprobs.token_logprobs
    assert values[0] is None
    whole = prompts[0] + echoed.token_ids  # type: ignore[attr-defined]
    assert values[1:] == pytest.approx(plain_logprobs(service.model, whole).tolist(), abs=1e-6)
    scored = client.completions.create(
        **{**asked, "max_tokens": 0}, prompt=prompts, echo=True, temperature=0, best_of=1, suffix=None, logit_bias={}
    )
    for prompt, choice in zip(prompts, scored.choices, strict=True):
        assert choice.token_ids == []  # type: ignore[attr-defined]
        expected = plain_logprobs(service.model, prompt)
        assert choice.logprobs.token_logprobs == [None, *(pytest.approx(v, abs=1e-6) for v in expected.tolist())]


def test_a_chat_is_written_by_the_chat_template(service: Service, client: openai.OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(service.model)
    found = client.chat.completions.create(
        model=service.model,
        messages=CHAT,
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert found.prompt_token_ids == expected  # type: ignore[attr-defined]
    (choice,) = found.choices
    tokens = choice.token_ids  # type: ignore[attr-defined]
    kept = tokens[:-1] if choice.finish_reason == "stop" else tokens
    assert choice.message.content == tokenizer.decode(kept)
    values = [one.logprob for one in choice.logprobs.content]
    greedy = plain_logprobs(service.model, expected + tokens)[len(expected) - 1 :]
    assert values == pytest.approx(greedy.tolist(), abs=1e-6)
    text = tokenizer.decode(kept)
    (ended,) = client.chat.completions.create(
        model=service.model, messages=CHAT, max_tokens=5, temperature=0, stop=[text[2:3]]
    ).choices
    assert text[2:3] not in ended.message.content
    assert text.startswith(ended.message.content)


def test_the_forms_of_messages_that_clients_send_make_the_same_prompt(service: Service, client: openai.OpenAI) -> None:
    def prompt_of(messages: list[Any], **options: Any) -> list[int]:
        extra = {"return_token_ids": True, "min_p": 0.0, "repetition_penalty": 1.0}
        asked = {"model": service.model, "max_tokens": 1, "extra_body": extra, **options}
        return client.chat.completions.create(messages=messages, **asked).prompt_token_ids  # type: ignore[attr-defined]

    system, user = {"role": "system", "content": "Add."}, CHAT[0]
    plain = prompt_of([system, user])
    parts = [{"type": "text", "text": user["content"]}]
    forms = [
        [system, {**user, "content": parts}],
        [system, {**user, "type": "text"}],
        [system, {**user, "name": "bob"}],
        [{**system, "role": "developer"}, {**user, "refusal": None, "annotations": [], "tool_calls": []}],
    ]
    neutral = {"tools": [], "logit_bias": {}, "response_format": {"type": "text"}, "store": False, "stream": False}
    assert [prompt_of(form, **neutral) for form in forms] == [plain] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_prompt_that_is_echoed_has_its_log_probabilities_and_the_likeliest_tokens(
    service: Service, client: openai.OpenAI, temperature: float
) -> None:
    """As lm-eval asks for them: those of a prompt do not depend on the temperature."""
    prompts = [[5, 6, 7, 8, 9, 10], [20, 30, 4]]
    found = client.completions.create(
        model=service.model, prompt=prompts, max_tokens=1, temperature=temperature, logprobs=2, seed=1234, echo=True
    )
    tokenizer = AutoTokenizer.from_pretrained(service.model)
    plain = AutoModelForCausalLM.from_pretrained(service.model, dtype=torch.float64)
    for prompt, choice in zip(prompts, found.choices, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(prompt) + 1
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        with torch.no_grad():
            expected = plain(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for place, token in enumerate(prompt[1:], 1):
            own = expected[place - 1, token].item()
            assert logprobs.token_logprobs[place] == pytest.approx(own, abs=1e-5)
            top = logprobs.top_logprobs[place]
            assert max(top.values()) == pytest.approx(expected[place - 1].max().item(), abs=1e-5)
            assert len(top) in (2, 3)
            is_greedy = int(expected[place - 1].argmax()) == token
            assert (logprobs.token_logprobs[place] == max(top.values())) == is_greedy
            assert tokenizer.decode([int(expected[place - 1].argmax())]) in top


def test_a_chat_has_the_likeliest_tokens_beside_its_own(service: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": service.model, "messages": CHAT, "max_tokens": 4, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices
    for one in choice.logprobs.content:
        assert [top.logprob for top in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
        assert one.logprob == one.top_logprobs[0].logprob  # at temperature 0
        assert one.token == one.top_logprobs[0].token


def test_answers_come_as_events_if_a_client_asks_for_them(service: Service, client: openai.OpenAI) -> None:
    asked: Any = {"model": service.model, "messages": CHAT, "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    plain: Any = {"model": service.model, "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0}
    texts = [one.choices[0].text for one in client.completions.create(**plain, stream=True)]
    assert "".join(texts) == client.completions.create(**plain).choices[0].text


def test_tools_are_shown_to_the_model_or_refused_with_the_reason(service: Service, client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    asked: Any = {"model": service.model, "messages": CHAT, "max_tokens": 2, "tools": [tool]}
    plain = client.chat.completions.create(**{**asked, "tools": []})
    assert client.chat.completions.create(**asked).usage.prompt_tokens > plain.usage.prompt_tokens
    none = client.chat.completions.create(**asked, tool_choice="none")
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="a tool of type web_search is not supported"):
        client.chat.completions.create(**{**asked, "tools": [{"type": "web_search"}]})
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(openai.BadRequestError, match="a part of type image_url is not supported"):
        client.chat.completions.create(**{**asked, "tools": [], "messages": [{"role": "user", "content": [image]}]})


def test_saved_weights_are_models(service: Service, client: openai.OpenAI) -> None:
    run = service.run()
    run.forward_backward([of_loss(datum(9, 0), "weights")], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=0.05)).result()
    path = run.save_weights_for_sampler("trained").result().path
    assert {service.model, path} <= {one.id for one in client.models.list().data}  # other tests have saved theirs
    assert [client.models.retrieve(name).id for name in (service.model, path)] == [service.model, path]
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-9'"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not supported"):
        client.embeddings.create(model=service.model, input="x")
    scored = (
        service.client()
        .create_sampling_client(model_path=path)
        .result()
        .compute_logprobs(types.ModelInput.from_ints([5, 6, 7]))
        .result()
    )
    (choice,) = client.completions.create(model=path, prompt=[5, 6, 7], max_tokens=1, echo=True, logprobs=0).choices
    assert choice.logprobs.token_logprobs[:3] == pytest.approx([None, *scored[1:]], abs=1e-6)
    assert scored[1] != pytest.approx(plain_logprobs(service.model, [5, 6]).item(), abs=1e-3)


def test_tinkers_lists_say_what_there_is(service: Service) -> None:
    """Sessions, runs and saved weights of two clients, page by page."""
    first, second = (service.run(rank=rank, user_metadata={"rank": str(rank)}) for rank in (2, 3))
    names = [run.get_info().model_id for run in (first, second)]
    state = first.save_state("one").result().path
    sampler = first.save_weights_for_sampler("two").result().path
    rest = tinker.RestClient(base_url=service.url, api_key=service.key)
    page = rest.list_training_runs(limit=2).result()
    assert page.cursor.total_count >= 2
    assert [run.training_run_id for run in page.training_runs] == names
    assert [run.lora_rank for run in page.training_runs] == [2, 3]
    rest_of_them = rest.list_training_runs(limit=1000, offset=1).result()
    assert len(rest_of_them.training_runs) == page.cursor.total_count - 1
    run = rest.get_training_run_by_tinker_path(state).result()
    assert (run.user_metadata, run.corrupted) == ({"rank": "2"}, False)
    assert run.last_checkpoint.tinker_path == state
    found = rest.list_checkpoints(names[0]).result().checkpoints
    assert [one.tinker_path for one in found] == [sampler, state]
    assert [(one.checkpoint_id, one.checkpoint_type) for one in found] == [
        ("sampler_weights/two", "sampler"),
        ("weights/one", "training"),
    ]
    assert 0 < found[0].size_bytes < found[1].size_bytes
    everyones = rest.list_user_checkpoints(limit=2).result()
    assert [one.tinker_path for one in everyones.checkpoints] == [sampler, state]
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.lora_rank, info.train_unembed, info.train_attn) == (2, False, True)
    session = names[0].partition(":")[0]
    assert session in rest.list_sessions(limit=1000).result().sessions
    assert rest.get_session(session).result().training_run_ids == [names[0]]
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    (timed,) = [one for one in rest.list_checkpoints(names[0]).result().checkpoints if one.tinker_path == state]
    assert (timed.expires_at - timed.time).total_seconds() > 3500
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    (left,) = rest.list_checkpoints(names[0]).result().checkpoints
    assert (left.tinker_path, left.expires_at) == (state, None)
    with pytest.raises(tinker.NotFoundError, match="checkpoints/weights/one/publish is not supported"):
        rest.publish_checkpoint_from_tinker_path(state).result()


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "gpt-9"}, 404, "unknown model 'gpt-9'"),
        ({"model": "tinker://a/weights/b"}, 400, "unknown saved weights"),
        ({"max_tokens": 100}, 400, "max_tokens=100 with a prompt of 1 tokens"),
        ({"prompt": [9999]}, 400, "token 9999"),
        ({"prompt": []}, 400, "prompt: is empty"),
        ({"logprobs": 50}, 400, "logprobs"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"n": 100_000}, 400, "limits.sequences"),
    ],
)
def test_what_is_not_served_is_refused(
    service: Service, client: openai.OpenAI, changes: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": service.model, "prompt": [5], "max_tokens": 4, **changes})
    assert caught.value.status_code == status
    assert message in caught.value.response.json()["error"]["message"]


def test_the_key_is_needed(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="tml-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=service.model, messages=CHAT)
    assert tinker.__version__ == "0.38.0"
