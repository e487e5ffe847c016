"""HTTP endpoint for evaluation harnesses: OpenAI's API. The program's thread samples the answers."""

import asyncio
import queue
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from automodel_rl.chat_api import chat_completions
from automodel_rl.chat_api.openai_requests import ChatRequest, CompletionRequest, SamplingRequest
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.generator_messages import Sampling
from automodel_rl.rollout.http_thread import HttpThread, body_of, described, refusal
from automodel_rl.rollout.openai_answers import OpenAIAnswers, completion_events
from automodel_rl.rollout.sampled import PromptScoring, Refused, Sampled, SamplePrompt
from automodel_rl.rollout.seeds import turn_seed

MODEL = "policy"
"""Name of the model; any other is accepted as well."""

Body = TypeVar("Body", bound=BaseModel)


@dataclass(eq=False)
class PromptRequest:
    prompts: list[SamplePrompt]
    answers: "Future[Sequence[Sampled | Refused]]" = field(default_factory=Future)


class EvaluationEndpoint:
    """A server on this machine.

    Args:
        max_length: most tokens of a prompt with its completion.
        seed: for requests that have none.

    Attributes:
        url: ends with `/v1`.
        asked: requests to be answered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: set[int], max_length: int, seed: int):
        self.max_length, self.seed, self.vocab_size = max_length, seed, len(tokenizer)
        self.asked: queue.SimpleQueue[PromptRequest] = queue.SimpleQueue()
        self._num_asked: Counter[tuple[int, ...]] = Counter()
        self._answers = OpenAIAnswers(tokenizer, stop_ids, self._sample)
        routes = [
            Route("/v1/completions", self._served(CompletionRequest, self._complete), methods=["POST"]),
            Route("/v1/chat/completions", self._served(ChatRequest, self._chat), methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        self._server = HttpThread("127.0.0.1", routes, "host")
        self.url, self.close = f"{self._server.url}/v1", self._server.close

    def _served(
        self, kind: type[Body], work: Callable[[Body], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def served(request: Request) -> Response:
            try:
                return await work(kind.model_validate_json(await body_of(request)))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"])) or "the request"
                return refusal(400, f"{place}: {first['msg'].removeprefix('Value error, ')}", "invalid_request")
            except InputError as error:
                return refusal(400, str(error), "invalid_request")
            except Exception as error:
                traceback.print_exc()
                return refusal(400, f"the endpoint failed on this request ({describe_root_cause(error)})", "failed")

        return served

    async def _complete(self, body: CompletionRequest) -> Response:
        found = await self._answers.complete(body)
        if body.stream:
            return StreamingResponse(completion_events(found, body.with_usage), media_type="text/event-stream")
        return JSONResponse(found)

    async def _chat(self, body: ChatRequest) -> Response:
        answers = await self._answers.chat(body)
        if body.stream:
            events = chat_completions.events(answers, body.with_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(chat_completions.reply(answers))

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described(MODEL)]})

    async def _sample(
        self,
        body: SamplingRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        *,
        with_logprobs: bool,
        num_top: int,
    ) -> Sequence[Sampled]:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        made = []
        for place, tokens in enumerate(prompts):
            room = self.max_length - len(tokens)
            if not tokens or room < 0 or (room == 0 and max_tokens != 0):
                raise InputError(
                    f"a prompt has {len(tokens)} tokens, but only {self.max_length} fit with an answer "
                    "(rollout.max_prompt_tokens + rollout.max_new_tokens, and batch.microbatch_tokens): send fewer"
                )
            if max(tokens) >= self.vocab_size:
                raise InputError(f"a prompt has token {max(tokens)}: ids are 0 to {self.vocab_size - 1}")
            most = max(1, min(room, room if max_tokens is None else max_tokens))
            sampling = Sampling(most, body.temperature, body.top_p, max(body.top_k, 0), stop)
            if body.seed is None:  # a repeated prompt is sampled anew
                digest = tuple(tokens)
                seed = turn_seed(self.seed, tokens, self._num_asked[digest])
                self._num_asked[digest] += 1
            else:
                seed = body.seed + place
            num_samples = 0 if max_tokens == 0 else body.n
            made.append(SamplePrompt(tokens, num_samples, seed, sampling, PromptScoring(with_logprobs), num_top))
        asked = PromptRequest(made)
        self.asked.put(asked)
        found = await asyncio.wrap_future(asked.answers)
        sampled = [answer for answer in found if isinstance(answer, Sampled)]
        if len(sampled) < len(found):
            raise InputError(next(answer.text for answer in found if isinstance(answer, Refused)))
        return sampled
