"""Completions and chats of OpenAI's API: sampling for a request, and the JSON of its answer."""

import asyncio
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from automodel_rl.chat_api.exchange import ChatAnswer, event
from automodel_rl.chat_api.messages import checked_messages, checked_tools, with_results_in_order
from automodel_rl.chat_api.openai_requests import ChatRequest, CompletionRequest, SamplingRequest
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError
from automodel_rl.rollout.agents.codecs import ChatCodecs, answer_of
from automodel_rl.rollout.episodes.chat_turns import ChatTurns
from automodel_rl.rollout.sampled import Sampled, SampledSequence

NOTHING = SampledSequence([], [], "length")


class SampleFunction(Protocol):
    async def __call__(
        self,
        body: SamplingRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        *,
        with_logprobs: bool,
        num_top: int,
    ) -> Sequence[Sampled]:
        """Samples for each prompt.

        Args:
            max_tokens: per completion; None for as many as fit, 0 to only score the prompts.
            with_logprobs: return log-probabilities of the prompts.
            num_top: number of likeliest tokens to return per position.

        Raises:
            InputError: the request cannot be sampled.
        """
        ...


class OpenAIAnswers:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], sample: SampleFunction):
        self.tokenizer, self.stop_ids, self._sample = tokenizer, stop_ids, sample

    async def complete(self, body: CompletionRequest) -> dict[str, Any]:
        """Returns the JSON of a completion. Raises InputError if the request cannot be served."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        prompts: list[Any] = [given] if given and isinstance(given[0], int) else given
        if not prompts:
            raise InputError("prompt: is empty: pass a text or token ids")
        with_logprobs = body.echo and body.logprobs is not None
        ids = await asyncio.to_thread(lambda: [self._ids(prompt) for prompt in prompts])
        sampled = await self._sample(
            body, ids, body.max_tokens, with_logprobs=with_logprobs, num_top=body.logprobs or 0
        )
        return await asyncio.to_thread(lambda: self._completion(body, ids, sampled))

    def _ids(self, prompt: Any) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _completion(self, body: CompletionRequest, ids: list[list[int]], sampled: Sequence[Sampled]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, answer in zip(ids, sampled, strict=True):
            for index, sequence in enumerate(answer.sequences if body.max_tokens else [NOTHING] * body.n):
                shown = [*prompt, *sequence.tokens] if body.echo else sequence.tokens
                text = (self.tokenizer.decode(prompt) if body.echo else "") + self._text(sequence, body.stop)
                tokens = {"token_ids": sequence.tokens, "prompt_token_ids": prompt} if body.return_token_ids else {}
                found = None
                if body.logprobs is not None:
                    found = self._logprobs(shown, *_values(body, prompt, answer, sequence, index))
                choices.append({"index": len(choices), "text": text, "logprobs": found, **_end(sequence), **tokens})
        return self._response("text_completion", body, ids, sampled, choices)

    async def chat(self, body: ChatRequest) -> list[ChatAnswer]:
        """Returns one answer per choice. Raises InputError if the request cannot be served."""
        ids, codec = await asyncio.to_thread(lambda: self._opening(body))
        most = body.max_completion_tokens or body.max_tokens
        (answer,) = await self._sample(body, [ids], most, with_logprobs=False, num_top=body.top_logprobs)
        return await asyncio.to_thread(lambda: self._answers(body, ids, answer, codec))

    def _opening(self, body: ChatRequest) -> tuple[list[int], ChatTurns]:
        if self.tokenizer.chat_template is None:
            raise InputError("the model's tokenizer has no chat template: use /v1/completions")
        _, codec = self._codecs.of(checked_tools(body.tools, body.tool_choice))
        return codec.prompt_ids(with_results_in_order(checked_messages(body.messages))), codec

    def _answers(self, body: ChatRequest, ids: list[int], answer: Sampled, codec: ChatTurns) -> list[ChatAnswer]:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        name, answers = secrets.token_hex(8), []
        for index, sequence in enumerate(answer.sequences):
            turn = codec.read(ids, sequence.tokens)
            turn = dataclasses.replace(turn, is_truncated=sequence.finish == "length")
            extras: dict[str, Any] = {"logprobs": None}
            if body.logprobs:
                extras["logprobs"] = {"content": self._content(ids, answer, sequence, index)}
            if body.return_token_ids:
                extras |= {"token_ids": sequence.tokens, "prompt_token_ids": ids}
            written, is_parallel = len(sequence.tokens), body.parallel_tool_calls
            answers.append(answer_of(turn, name, body.model, stop, len(ids), written, extras, is_parallel=is_parallel))
        return answers

    @functools.cached_property
    def _codecs(self) -> ChatCodecs:
        return ChatCodecs(ChatTemplate(self.tokenizer))

    def _text(self, sequence: SampledSequence, stop: str | list[str] | None) -> str:
        """Returns the text of a completion, without the token or text that ended it."""
        tokens = sequence.tokens
        is_ended = sequence.finish == "stop" and tokens and tokens[-1] in self.stop_ids
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
        self, prompt: list[int], answer: Sampled, sequence: SampledSequence, index: int
    ) -> list[dict[str, Any]]:
        values: list[float] = sequence.logprobs
        tops: list[list[tuple[int, float]]] = [[] for _ in sequence.tokens]
        if answer.scored:
            scored, start = answer.scored[index], len(prompt)
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
        sampled: Sequence[Sampled],
        choices: list[dict[str, Any]],
    ) -> dict[str, Any]:
        asked = sum(map(len, prompts))
        written = sum(len(sequence.tokens) for answer in sampled for sequence in answer.sequences)
        usage = {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}
        made = {"id": f"cmpl-{secrets.token_hex(8)}", "object": kind, "created": int(time.time()), "model": body.model}
        return {**made, "choices": choices, "usage": usage}


def completion_events(found: dict[str, Any], with_usage: bool) -> Iterator[str]:
    """Yields the events of a completion, one per choice."""
    head = {key: found[key] for key in ("id", "object", "created", "model")}
    for choice in found["choices"]:
        yield event({**head, "choices": [choice]})
    if with_usage:
        yield event({**head, "choices": [], "usage": found["usage"]})
    yield event("[DONE]")


def _numbers(answer: Sampled) -> list[float]:
    """Returns the log-probabilities of a prompt's tokens after the first."""
    known = answer.prompt.logprobs
    return [] if known is None else [float(value) for value in known[1:]]


def _values(
    body: CompletionRequest, prompt: list[int], answer: Sampled, sequence: SampledSequence, index: int
) -> tuple[list[float | None], list[dict[int, float] | None] | None]:
    """Returns the log-probabilities of the returned tokens, and the likeliest tokens of each if requested. A prompt's
    first token has none."""
    if not answer.scored:
        before = [None, *_numbers(answer)] if body.echo else []
        return [*before, *sequence.logprobs], None
    scored, start = answer.scored[index if len(answer.scored) > 1 else 0], 0 if body.echo else len(prompt)
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
