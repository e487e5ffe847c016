"""HTTP endpoint for agents: OpenAI's chat completions and responses, and Anthropic's messages.

Answers are generated as a whole. Where a client asks for events, a whole answer is sent as a few of them.
"""

import asyncio
import functools
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from automodel_rl.chat_api import anthropic, chat_completions, responses
from automodel_rl.chat_api.exchange import ChatAnswer, ChatCall
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.rollout.agents.episode import AgentEpisode, NoMoreCallsError, TooLongError, identity_of
from automodel_rl.rollout.agents.protocol import MODEL, AgentEndpoint
from automodel_rl.rollout.http_thread import HttpThread, body_of, described, parsed, refusal

MAX_ENDED = 100_000
BASES = ("/v1", "/e/{key}/v1")
"""Prefixes of all paths: the key is in a header, or in the path."""

Read = Callable[[dict[str, Any]], ChatCall]
Reply = Callable[[ChatAnswer, ChatCall], dict[str, Any]]
Events = Callable[[ChatAnswer, ChatCall], Iterator[str]]


class _UnknownKeyError(Exception):
    """No episode has the key."""


class Endpoint:
    """Answers the calls of episodes.

    Attributes:
        loop: the event loop in which episodes run.
        url: without a path.
    """

    def __init__(self, host: str):
        self._episodes: dict[str, AgentEpisode] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server = HttpThread(host, self._routes(), "rollout.agent_host")
        self.loop, self.url, self.close = self._server.loop, self._server.url, self._server.close

    def open(self, episode: AgentEpisode, seed: int) -> AgentEndpoint:
        """Registers an episode, and returns its agent's endpoint. Called in the event loop."""
        self._episodes[episode.key] = episode
        return AgentEndpoint(f"{self.url}/v1", episode.key, f"{self.url}/e/{episode.key}/v1", seed=seed)

    def forget(self, episode: AgentEpisode) -> None:
        """Refuses calls of an episode from now on. Called in the event loop."""
        self._episodes.pop(episode.key, None)
        self._ended[episode.key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _routes(self) -> list[Route]:
        def chat_reply(answer: ChatAnswer, call: ChatCall) -> dict[str, Any]:
            return chat_completions.reply([answer])

        def chat_events(answer: ChatAnswer, call: ChatCall) -> Iterator[str]:
            return chat_completions.events([answer], call.with_usage)

        answered = {
            "chat/completions": self._answered(chat_completions.read, chat_reply, chat_events),
            "responses": self._answered(responses.read, responses.reply, responses.events),
            "messages": self._answered(anthropic.read, anthropic.reply, anthropic.events),
            "messages/count_tokens": self._counted,
        }
        routes = [
            Route(f"{base}/{path}", _safe(work), methods=["POST"]) for base in BASES for path, work in answered.items()
        ]
        routes += [Route(f"{base}/models", _safe(self._models), methods=["GET"]) for base in BASES]
        routes += [Route(f"{base}/models/{{name:path}}", _safe(self._model), methods=["GET"]) for base in BASES]
        return [*routes, Route("/{path:path}", _not_served, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]

    def _answered(self, read: Read, reply: Reply, events: Events) -> Callable[[Request], Awaitable[Response]]:
        async def work(request: Request) -> Response:
            episode = self._episode(request)
            raw = await body_of(request)
            try:
                # In a thread, as its time grows with the size of the body, and other agents call meanwhile.
                body, call = await asyncio.to_thread(_read, read, raw)
                retries = request.headers.get("x-stainless-retry-count", "0")
                given = request.headers.get("idempotency-key", "")
                identity = identity_of(f"{request.url.path} {given}", b"" if given else raw)
                answer = await episode.answer(call, identity, is_retry=bool(given) or retries not in ("", "0"))
            except InputError as error:
                episode.refused.append(str(error))
                raise
            if not await request.is_disconnected():
                episode.mark_received(answer)
            named = ChatAnswer(**{**vars(answer), "model": str(body.get("model") or MODEL)})
            if call.streams:
                return StreamingResponse(events(named, call), media_type="text/event-stream")
            return JSONResponse(reply(named, call))

        return work

    async def _counted(self, request: Request) -> Response:
        episode = self._episode(request)
        raw = await body_of(request)
        _, call = await asyncio.to_thread(_read, functools.partial(anthropic.read, counts_only=True), raw)
        return JSONResponse({"input_tokens": await episode.count_tokens(call)})

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        return JSONResponse({"object": "list", "data": [described(MODEL)]})

    async def _model(self, request: Request) -> Response:
        self._episode(request)
        return JSONResponse(described(request.path_params["name"]))

    def _episode(self, request: Request) -> AgentEpisode:
        headers = request.headers
        bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
        keys = [key for key in (request.path_params.get("key"), bearer, headers.get("x-api-key")) if key]
        for key in keys:
            if key in self._episodes:
                return self._episodes[key]
        if any(key in self._ended for key in keys):
            raise NoMoreCallsError("the episode of this key is over: the agent has returned, or was ended")
        raise _UnknownKeyError


def _read(read: Read, raw: bytes) -> tuple[dict[str, Any], ChatCall]:
    body = parsed(raw)
    return body, read(body)


def _safe(work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turns errors into answers. Clients retry after 408, 409, 429 and 5xx, so refusals have other 4xx codes."""

    async def safe(request: Request) -> Response:
        try:
            return await work(request)
        except NoMoreCallsError as error:
            return refusal(400, str(error), "episode_over")
        except TooLongError as error:
            return refusal(400, str(error), "context_length_exceeded")
        except InputError as error:
            return refusal(400, str(error), "invalid_request")
        except _UnknownKeyError:
            return refusal(401, "unknown key: send AgentEndpoint.key", "invalid_api_key")
        except Exception as error:
            traceback.print_exc()
            return refusal(400, f"the endpoint failed on this request ({describe_root_cause(error)})", "failed")

    return safe


async def _not_served(request: Request) -> Response:
    served = "chat/completions, responses, messages, messages/count_tokens and models below /v1 are"
    return refusal(404, f"{request.method} {request.url.path} is not served: {served}", "not_served")
