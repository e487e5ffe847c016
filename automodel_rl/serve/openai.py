"""Completions by OpenAI's API, for evaluation harnesses and environments: /v1/completions and /v1/chat/completions."""

import asyncio
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.chat_api.exchange import ChatAnswer, event
from automodel_rl.chat_api.messages import checked_messages, checked_tools
from automodel_rl.config import ServeConfig
from automodel_rl.data.ends import completion_ends
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.rollout.agents.codecs import ChatCodecs, answer_of
from automodel_rl.rollout.episodes.chat_turns import ChatTurns
from automodel_rl.serve import checks
from automodel_rl.serve.messages import Sampled, SampledSequence, SamplePrompt
from automodel_rl.serve.openai_requests import ChatRequest, CompletionRequest, SamplingRequest
from automodel_rl.serve.ranks import RanksLostError, RefusedError
from automodel_rl.serve.requests import ChunkBody, PromptBody, SampleBody, SamplingBody
from automodel_rl.serve.service import Service
from automodel_rl.serve.tables import BusyError, UnknownError, Weights

NOTHING = SampledSequence([], [], "length")
"""What is sampled where a request asks for no token."""


class Completions:
    """Samples for requests of OpenAI's API, and waits until they are there.

    Args:
        service: the server's state.
        config: the service's config.
    """

    def __init__(self, service: Service, config: ServeConfig):
        self.service, self.config = service, config
        self._num_waiting, self._began = 0, time.time()

    @property
    def models(self) -> dict[str, Any]:
        """The base model and all saved weights."""
        saved = [_model(one.path, one.created) for one in self.service.saved.all]
        return {"object": "list", "data": [_model(self.config.base_name, self._began), *saved]}

    def model(self, name: str) -> dict[str, Any]:
        """One of the models.

        Raises:
            InputError, UnknownError: there is no such model, or it cannot be sampled from.
        """
        saved = self._weights(name).saved
        return _model(name, self._began if saved is None else saved.created)

    async def complete(self, body: CompletionRequest) -> dict[str, Any]:
        """Continues texts or tokens."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        prompts: list[Any] = [given] if given and isinstance(given[0], int) else given
        self._check_size(len(prompts), body.n)
        with_logprobs = body.logprobs is not None
        ids = await asyncio.to_thread(lambda: [self._ids(prompt) for prompt in prompts])
        sampled = await self._sample(body, ids, body.max_tokens, body.echo and with_logprobs, body.logprobs or 0)
        return await asyncio.to_thread(lambda: self._completion(body, ids, sampled))

    def _ids(self, prompt: Any) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _completion(self, body: CompletionRequest, ids: list[list[int]], sampled: list[Sampled]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, answer in zip(ids, sampled, strict=True):
            for place, sequence in enumerate(answer.sequences if body.max_tokens else [NOTHING] * body.n):
                shown = [*prompt, *sequence.tokens] if body.echo else sequence.tokens
                text = (self.tokenizer.decode(prompt) if body.echo else "") + self._text(sequence, body.stop)
                tokens = {"token_ids": sequence.tokens, "prompt_token_ids": prompt} if body.return_token_ids else {}
                found = None
                if body.logprobs is not None:
                    found = self._logprobs(shown, *_values(body, prompt, answer, sequence, place))
                choices.append({"index": len(choices), "text": text, "logprobs": found, **_end(sequence), **tokens})
        return self._response("text_completion", body, ids, sampled, choices)

    async def chat(self, body: ChatRequest) -> list[ChatAnswer]:
        """Answers a chat: a turn for each choice."""
        self._check_size(1, body.n)
        ids, codec = await asyncio.to_thread(lambda: self._opening(body))
        most = body.max_completion_tokens or body.max_tokens
        (answer,) = await self._sample(body, [ids], most, False, body.top_logprobs)
        return await asyncio.to_thread(lambda: self._answers(body, ids, answer, codec))

    def _opening(self, body: ChatRequest) -> tuple[list[int], ChatTurns]:
        if self.tokenizer.chat_template is None:
            raise InputError("the model's tokenizer has no chat template: use /v1/completions")
        tools = checked_tools(body.tools) if body.tool_choice == "auto" else ()
        _, codec = self._codecs.of(tools)
        return codec.opening(checked_messages(body.messages)), codec

    def _answers(self, body: ChatRequest, ids: list[int], answer: Sampled, codec: ChatTurns) -> list[ChatAnswer]:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        name, answers = secrets.token_hex(8), []
        for place, sequence in enumerate(answer.sequences):
            turn = codec.read(ids, sequence.tokens)
            turn = dataclasses.replace(turn, is_cut=sequence.finish == "length")
            extras: dict[str, Any] = {"logprobs": None}
            if body.logprobs:
                extras["logprobs"] = {"content": self._content(ids, answer, sequence, place)}
            if body.return_token_ids:
                extras |= {"token_ids": sequence.tokens, "prompt_token_ids": ids}
            answers.append(answer_of(turn, name, body.model, stop, len(ids), len(sequence.tokens), extras))
        return answers

    def _check_size(self, num_prompts: int, n: int) -> None:
        limits = self.config.limits
        if not num_prompts:
            raise InputError("prompt: is empty: give a text, or token ids")
        if num_prompts * n > limits.sequences:
            raise InputError(
                f"{num_prompts} prompts with n={n}: at most {limits.sequences} sequences (limits.sequences)"
            )
        if self._num_waiting >= limits.waiting:
            raise BusyError(f"{self._num_waiting} requests wait (limits.waiting): ask again later")

    async def _sample(
        self,
        body: SamplingRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        with_logprobs: bool,
        num_top: int = 0,
    ) -> list[Sampled]:
        weights = self._weights(body.model)
        sampling = SamplingBody(
            max_tokens=1 if max_tokens == 0 else max_tokens,
            seed=body.seed,
            stop=body.stop or None,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
        )
        jobs: list[SamplePrompt] = [
            checks.prompt_of(
                SampleBody(
                    sampling_session_id="",
                    seq_id=0,
                    num_samples=body.n,
                    prompt=PromptBody(chunks=[ChunkBody(tokens=ids)]),
                    sampling_params=sampling,
                    prompt_logprobs=with_logprobs,
                ),
                self.config,
                self.service.ranks.vocab_size,
            )
            for ids in prompts
        ]
        jobs = [dataclasses.replace(job, num_top=num_top) for job in jobs]
        if max_tokens == 0:  # the prompts are only scored
            jobs = [dataclasses.replace(job, num_samples=0) for job in jobs]
        self._num_waiting += 1
        try:
            return await asyncio.wrap_future(self.service.ranks.submit(self.service.samplers.job(weights, jobs)))
        except RefusedError as error:
            raise InputError(str(error)) from None
        except RanksLostError:
            raise BusyError("the ranks ended while they sampled, and are started again: ask again") from None
        finally:
            self._num_waiting -= 1

    def _weights(self, name: str) -> Weights:
        if name == self.config.base_name:
            return Weights()
        if not name.startswith("tinker://"):
            raise UnknownError(
                f"there is no model {name!r}: use {self.config.base_name}, or the tinker:// path of saved weights"
            )
        return Weights(saved=self.service.saved.usable(name))

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, opened for the first request."""
        return self._model.tokenizer()

    @functools.cached_property
    def _model(self) -> OpenedModel:
        return OpenedModel.open(self.config.model)

    @functools.cached_property
    def _ends(self) -> set[int]:
        """The tokens that end a completion."""
        return completion_ends(self._model.files.folder, self._model.whole, self.tokenizer)

    @functools.cached_property
    def _codecs(self) -> ChatCodecs:
        return ChatCodecs(ChatTemplate(self.tokenizer))

    def _text(self, sequence: SampledSequence, stop: str | list[str] | None) -> str:
        """The text of a completion, without the token or the text that ended it."""
        tokens = sequence.tokens
        is_ended = sequence.finish == "stop" and tokens and tokens[-1] in self._ends
        text = self.tokenizer.decode(tokens[:-1] if is_ended else tokens, skip_special_tokens=False)
        places = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop or []) if one in text]
        return text[: min(places, default=len(text))]

    def _logprobs(
        self, tokens: list[int], values: list[float | None], top: list[dict[int, float] | None] | None
    ) -> dict[str, Any]:
        texts = [self.tokenizer.decode([token]) for token in tokens]
        offsets = [0, *itertools.accumulate(map(len, texts[:-1]))] if texts else []
        named = None
        if top is not None:
            named = [of and {self.tokenizer.decode([token]): value for token, value in of.items()} for of in top]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": named, "text_offset": offsets}

    def _content(
        self, prompt: list[int], answer: Sampled, sequence: SampledSequence, place: int
    ) -> list[dict[str, Any]]:
        values: list[float] = sequence.logprobs
        tops: list[list[tuple[int, float]]] = [[] for _ in sequence.tokens]
        if answer.scored:
            scored, start = answer.scored[place], len(prompt)
            values = scored.logprobs[start:].tolist()
            pairs = zip(scored.top_ids[start:].tolist(), scored.top_logprobs[start:].tolist(), strict=True)
            tops = [[*zip(*of_token, strict=True)] for of_token in pairs]
        return [
            {**self._named(token, value), "top_logprobs": [self._named(*one) for one in top]}
            for token, value, top in zip(sequence.tokens, values, tops, strict=True)
        ]

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def _response(
        self,
        kind: str,
        body: SamplingRequest,
        prompts: list[list[int]],
        sampled: list[Sampled],
        choices: list[dict[str, Any]],
    ) -> dict[str, Any]:
        asked = sum(map(len, prompts))
        written = sum(len(sequence.tokens) for answer in sampled for sequence in answer.sequences)
        usage = {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
        made = {"id": f"cmpl-{secrets.token_hex(8)}", "object": kind, "created": int(time.time()), "model": body.model}
        return {**made, "choices": choices, "usage": usage}


def completion_events(found: dict[str, Any], with_usage: bool) -> Iterator[str]:
    """The events of a completion: each choice whole.

    Args:
        found: the completion.
        with_usage: whether the last event tells the number of tokens.
    """
    head = {key: found[key] for key in ("id", "object", "created", "model")}
    for choice in found["choices"]:
        yield event({**head, "choices": [choice]})
    if with_usage:
        yield event({**head, "choices": [], "usage": found["usage"]})
    yield event("[DONE]")


def _model(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "local"}


def _numbers(answer: Sampled) -> list[float]:
    """Log-probabilities of a prompt's tokens after the first."""
    return [] if answer.prompt_logprobs is None else [float(value) for value in answer.prompt_logprobs[1:]]


def _values(
    body: CompletionRequest, prompt: list[int], answer: Sampled, sequence: SampledSequence, place: int
) -> tuple[list[float | None], list[dict[int, float] | None] | None]:
    """The log-probabilities of what is shown, and with each the likeliest tokens if they are asked for. Nothing
    predicts a prompt's first token."""
    if not answer.scored:
        before = [None, *_numbers(answer)] if body.echo else []
        return [*before, *sequence.logprobs], None
    scored, start = answer.scored[place if len(answer.scored) > 1 else 0], 0 if body.echo else len(prompt)
    rows = zip(scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True)
    tops: list[dict[int, float] | None] = [dict(zip(*row, strict=True)) for row in rows]
    values: list[float | None] = scored.logprobs.tolist()
    own = [*prompt, *sequence.tokens]
    for token, value, top in zip(own, values, tops, strict=True):
        if top is not None and value is not None:
            top.setdefault(token, value)
    values[0] = tops[0] = None
    return values[start:], tops[start:]


def _end(sequence: SampledSequence) -> dict[str, str]:
    return {"finish_reason": sequence.finish}
