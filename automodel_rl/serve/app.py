"""Routes of the HTTP server: authentication, body limit and errors. `Service` does the rest."""

import asyncio
import hmac
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from automodel_rl.chat_api import chat_completions
from automodel_rl.chat_api.openai_requests import ChatRequest, CompletionRequest
from automodel_rl.config import ServeConfig
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.origins import SameOriginMiddleware
from automodel_rl.rollout.openai_answers import OpenAIAnswers, completion_events
from automodel_rl.serve import requests
from automodel_rl.serve.openai import Completions
from automodel_rl.serve.page import page, state_of
from automodel_rl.serve.results import Result
from automodel_rl.serve.saved_weights import UnwritableError
from automodel_rl.serve.service import Service
from automodel_rl.serve.tables import BusyError, UnknownError
from automodel_rl.serve.wire import read_request

POLL_SECONDS = 30.0
"""How long a request for a result is held open. The client times out after 45 seconds and polls again."""

PROTOBUF = "application/x-protobuf"

CLIENT_CONFIG = {"proto_compress_fwdbwd": False, "pjwt_auth_enabled": False, "sample_max_concurrent_requests": 500}
"""Feature switches of the client."""

BASES = ("/api/v1", "/v1")
"""Path prefixes of Tinker's and OpenAI's APIs."""

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[Any], Any]


class TooLargeError(Exception):
    """A body exceeds the size limit."""


class RanksAbsentError(Exception):
    """The ranks have ended and new ones are not ready."""


def make_app(service: Service, config: ServeConfig, key: str) -> Starlette:
    own_pages = Middleware(SameOriginMiddleware, bound=config.host)
    return Starlette(routes=_Routes(service, config, key).all(), middleware=[own_pages])


class _Routes:
    def __init__(self, service: Service, config: ServeConfig, key: str):
        self.service, self.config, self.key = service, config, key.encode()
        self.completions = Completions(service, config)

    def all(self) -> list[Route]:
        service = self.service
        posts: dict[str, tuple[type[requests.Body], Handler]] = {
            "client/config": (requests.NoBody, lambda _: CLIENT_CONFIG),
            "client/dynamic_config": (requests.NoBody, lambda _: {}),
            "telemetry": (requests.NoBody, lambda _: {"status": "accepted"}),
            "create_session": (requests.NewSessionBody, service.create_session),
            "session_heartbeat": (requests.SessionBody, lambda body: service.heartbeat(body.session_id)),
            "create_model": (requests.CreateModelBody, service.create_model),
            "get_info": (requests.ModelBody, lambda body: service.info(body.model_id)),
            "create_sampling_session": (requests.SamplingSessionBody, service.samplers.create),
            "asample": (requests.SampleBody, service.samplers.sample),
            "weights_info": (requests.WeightsInfoBody, service.lists.weights_info),
        }
        turns: dict[str, tuple[Any, Handler]] = {
            "optim_step": (requests.OptimStepBody, service.optim_step),
            "save_weights": (requests.SaveBody, lambda body: service.save(body, "weights")),
            "save_weights_for_sampler": (requests.SaveBody, lambda body: service.save(body, "sampler_weights")),
            "load_weights": (requests.LoadBody, service.load),
        }
        gets: dict[str, Handler] = {
            "healthz": lambda _: self._health(),
            "get_server_capabilities": lambda _: {"supported_models": self._models()},
            "samplers/{name}": lambda found: service.samplers.describe(found["name"]),
            "training_runs": service.lists.runs,
            "training_runs/{name}": service.lists.run,
            "training_runs/{name}/checkpoints": service.lists.weights_of_run,
            "checkpoints": service.lists.weights,
            "sessions": service.lists.sessions,
            "sessions/{name}": service.lists.session,
        }
        routes = [self._route(path, "POST", self._posted(kind, handler)) for path, (kind, handler) in posts.items()]
        routes += [self._route(path, "POST", self._posted_in_order(*turn)) for path, turn in turns.items()]
        routes += [self._route(path, "GET", self._asked(handler)) for path, handler in gets.items()]
        routes += [
            self._route("forward_backward", "POST", self._forward_backward),
            self._route("retrieve_future", "POST", self._retrieve),
            self._route("sessions/{name}/finish", "POST", self._asked(lambda p: service.finish_session(p["name"]))),
            self._route("training_runs/{run}/checkpoints/{kind}/{name}", "DELETE", self._asked(self._delete)),
            self._route("training_runs/{run}/checkpoints/{kind}/{name}/ttl", "PUT", self._set_ttl),
            Route("/", self._page, methods=["GET"]),
            Route("/state", self._state, methods=["GET"]),
        ]
        return [*routes, *self._of_openai(), *(self._route("{path:path}", None, _not_served, base) for base in BASES)]

    def _of_openai(self) -> list[Route]:
        completions = self.completions

        async def models(request: Request) -> Response:
            return JSONResponse(completions.models)

        async def model(request: Request) -> Response:
            return JSONResponse(completions.model(request.path_params["name"]))

        async def complete(request: Request) -> Response:
            body = CompletionRequest.model_validate_json(await self._body(request) or b"{}")
            found = await (await _opened(completions)).complete(body)
            if body.stream:
                return _events(completion_events(found, body.with_usage))
            return JSONResponse(found)

        async def chat(request: Request) -> Response:
            body = ChatRequest.model_validate_json(await self._body(request) or b"{}")
            answers = await (await _opened(completions)).chat(body)
            if body.stream:
                return _events(chat_completions.events(answers, body.with_usage))
            shown = {name: answers[0].extras[name] for name in ("prompt_token_ids",) if name in answers[0].extras}
            return JSONResponse(chat_completions.reply(answers) | shown)  # as in vLLM

        return [
            self._route("models", "GET", models, "/v1"),
            self._route("models/{name:path}", "GET", model, "/v1"),
            self._route("completions", "POST", complete, "/v1"),
            self._route("chat/completions", "POST", chat, "/v1"),
        ]

    def _route(
        self, path: str, method: str | None, work: Callable[[Request], Awaitable[Response]], base: str = "/api/v1"
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(request.headers.get("x-api-key", bearer).encode(), self.key):
                return _error(
                    401,
                    "missing or wrong key in the header X-API-Key or the bearer token: set TINKER_API_KEY, or "
                    "OPENAI_API_KEY, to the server's key",
                )
            return await _answered(work, request)

        return Route(f"{base}/{path}", endpoint, methods=[method] if method else METHODS)

    def _posted(self, kind: type[BaseModel], handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def work(request: Request) -> Response:
            body = kind.model_validate_json(await self._body(request) or b"{}")
            return JSONResponse(handler(body))

        return work

    def _asked(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def work(request: Request) -> Response:
            await self._body(request)
            return JSONResponse(handler({**request.query_params, **request.path_params}))

        return work

    def _posted_in_order(
        self, kind: type[requests.OptimStepBody | requests.SaveBody | requests.LoadBody], handler: Handler
    ) -> Callable[[Request], Awaitable[Response]]:
        """Handles a request with a turn in its run. An invalid one takes its turn and fails, as later requests wait
        for that turn."""

        async def work(request: Request) -> Response:
            data = await self._body(request) or b"{}"
            try:
                body = kind.model_validate_json(data)
            except ValidationError as error:
                try:
                    turn = requests.SequencedBody.model_validate_json(data)
                except ValidationError:
                    raise error from None
                return JSONResponse(self.service.refuse(turn, data, line_of(error)))
            return JSONResponse(handler(body))

        return work

    async def _forward_backward(self, request: Request) -> Response:
        return JSONResponse(self.service.forward_backward(read_request(await self._body(request))))

    async def _retrieve(self, request: Request) -> Response:
        body = requests.FutureBody.model_validate_json(await self._body(request) or b"{}")
        result: Result | None = await self.service.retrieve(body.request_id, POLL_SECONDS)
        if result is None:  # on 408 the client polls again without a warning
            waits = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waits, 408)
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)

    async def _body(self, request: Request) -> bytes:
        """Reads the body, enforcing the size limit as it arrives."""
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self.config.max_bytes:
                raise TooLargeError
        return bytes(data)

    def _health(self) -> dict[str, str]:
        if not self.service.ranks.are_ready:
            raise RanksAbsentError
        return {"status": "ok"}

    def _models(self) -> list[dict[str, Any]]:
        longest = {"max_context_length": self.config.microbatch_tokens, "sampleable": True}
        names = [self.config.base_name, *self.config.teachers]
        return [{"model_name": name, **longest, "trainable": name == names[0]} for name in names]

    def _delete(self, found: dict[str, str]) -> dict[str, Any]:
        try:
            self.service.delete(_path_of(found))
        except InputError as error:
            raise UnknownError(str(error)) from None
        return {}

    async def _set_ttl(self, request: Request) -> Response:
        body = requests.TtlBody.model_validate_json(await self._body(request) or b"{}")
        return JSONResponse(self.service.lists.set_ttl(_path_of(request.path_params), body))

    async def _page(self, request: Request) -> Response:
        if not hmac.compare_digest(request.query_params.get("key", "").encode(), self.key):
            return HTMLResponse("<p>Open this page with ?key=KEY, as the server printed it.</p>", 401)
        return HTMLResponse(page())

    async def _state(self, request: Request) -> Response:
        if not hmac.compare_digest(request.query_params.get("key", "").encode(), self.key):
            return _error(401, "the key is missing or wrong")
        tokenizer = None
        if self.service.history.samples:
            tokenizer = (await _opened(self.completions)).tokenizer
        return JSONResponse(state_of(self.service, tokenizer))


async def _opened(completions: Completions) -> OpenAIAnswers:
    """Returns the completions' answers, opening the tokenizer in a thread at the first request."""
    return await asyncio.to_thread(lambda: completions.answers)


def _events(events: Iterator[str]) -> Response:
    """Streams an answer that is already complete."""
    return StreamingResponse(events, media_type="text/event-stream")


def _path_of(found: dict[str, str]) -> str:
    return f"tinker://{found['run']}/{found['kind']}/{found['name']}"


async def _not_served(request: Request) -> Response:
    return _error(404, f"{request.method} {request.url.path} is not supported: see serve/README.md")


async def _answered(work: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """Runs a route. Errors become one line in JSON, which the client shows."""
    try:
        return await work(request)
    except ValidationError as error:
        return _error(400, line_of(error))
    except InputError as error:
        return _error(400, str(error))
    except UnknownError as error:
        return _error(404, str(error))
    except UnwritableError as error:  # 403, as clients retry forever after a 500
        return _error(403, str(error))
    except BusyError as error:
        return _error(429, str(error))
    except TooLargeError:
        return _error(413, "the body is larger than limits.body_mib: send less at once")
    except RanksAbsentError:
        return _error(503, "the ranks have exited and are being restarted: jobs wait for them")
    except Exception as error:
        traceback.print_exc()
        return _error(500, f"the server failed on this request ({describe_root_cause(error)})")


def line_of(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the body"
    return f"{place}: {first['msg'].removeprefix('Value error, ')}"


def _error(status: int, text: str) -> Response:
    return JSONResponse({"detail": text, "error": {"message": text}}, status)  # the forms of both APIs
