"""Generation by vLLM servers that are already running, over HTTP."""

import base64
import io
import sys
import urllib.error
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.generator_messages import RawCompletion, Request
from automodel_rl.generators.completions import completion_of
from automodel_rl.generators.protocol import Completion, RankGenerator
from automodel_rl.generators.vllm_checks import check_server, listed
from automodel_rl.generators.vllm_http import VllmServer
from automodel_rl.generators.vllm_server_weights import ServerWeights, is_available

MAX_CONCURRENT_REQUESTS = 256
"""Open requests per server, each of which blocks a thread. The pool has at least four times as many."""

NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling parameters that do not change the distribution. Sent with every request, because servers take the defaults
from the checkpoint's generation_config.json."""


class VllmServers(RankGenerator):
    """Sends requests to servers, round-robin. The servers were checked by `connect_servers`.

    A server that does not answer gets no requests until the next weight sync; other servers take over its requests.

    Args:
        urls: URLs of servers, or files that list them.
        servers: the initial servers.
        ends: end tokens of requests whose `stop_token_ids` is None.
        is_leader: whether this rank sends weights to the servers.
        routes: whether servers must report the experts of tokens.

    Attributes:
        weights: the channel of the servers' weights.
    """

    def __init__(
        self,
        urls: Sequence[str],
        servers: Sequence[VllmServer],
        ends: tuple[int, ...],
        is_leader: bool,
        *,
        routes: bool = False,
    ):
        self.urls, self.servers, self.ends, self.routes = urls, servers, ends, routes
        self.weights = ServerWeights(servers, is_leader)
        there = next(server for server in servers if is_available(server))
        self.model = there.get("/v1/models")["data"][0]["id"]
        self._requests = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS * max(4, len(servers)))
        self._gone: dict[VllmServer, int] = {}  # servers that did not answer, and the weight sync then
        self._mentioned: set[str] = set()

    @property
    def have_changed(self) -> bool:
        """Whether servers that receive weights have disappeared, or others have appeared. Only checked on the leading
        rank, False on others."""
        weights = self.weights
        if not weights.is_leader:
            return False
        try:
            self.servers = weights.servers = listed(self.urls)
        except InputError as problem:  # for example while the file is being written
            self._warn(f"{problem}; keeping the previous servers")
        return {server for server in self.servers if self._is_usable(server)} != set(weights.members)

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        if self.weights.is_broken:
            raise WeightSyncError("a server has incomplete weights after a failed weight sync: restart the servers")
        return [
            self._requests.submit(self._complete_anywhere, index, request) for index, request in enumerate(requests)
        ]

    def close(self) -> None:
        """Drops requests that are not sent yet. The servers keep running."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self.weights.close()

    def _is_usable(self, server: VllmServer) -> bool:
        try:
            check_server(server, self.routes)
        except InputError as problem:
            self._warn(f"{problem}; it gets no requests until then")
            return False
        return True

    def _warn(self, text: str) -> None:
        """Prints a warning, the first time only."""
        if text not in self._mentioned:
            self._mentioned.add(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _complete_anywhere(self, index: int, request: Request) -> Completion:
        """Tries the servers that have weights, first the one for this index or conversation. Raises ConnectionError if
        none answers."""
        first = index if request.conversation is None else request.conversation
        problem = "no server answers"
        members = self.weights.members
        for turn in range(len(members)):
            server = members[(first + turn) % len(members)]
            if self._gone.get(server) == self.weights.version:
                continue
            try:
                return self._complete(request, server)
            except OSError as error:
                self._gone[server] = self.weights.version
                problem = _failed(server, error).error
        raise ConnectionError(problem)

    def _complete(self, request: Request, server: VllmServer) -> Completion:
        """Returns a server's completion or error. Raises OSError if it does not answer."""
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "seed": request.seed,
            "logprobs": 1,
            "return_token_ids": True,
            **NEUTRAL_SAMPLING,
            **request.sampling.for_vllm(self.ends),
        }
        oldest = self.weights.version
        try:
            choice = server.post("/v1/completions", body)["choices"][0]
            written = RawCompletion(
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                choice["finish_reason"],
                oldest,
                self.weights.version,
                _decoded(choice.get("routed_experts")),
            )
            return completion_of(written)
        except (urllib.error.HTTPError, ValueError, LookupError, TypeError) as error:
            return _failed(server, error)


def _failed(server: VllmServer, error: Exception) -> Completion:
    text = f"{server.url}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Completion([], [], "error", text)


def _decoded(routes: str | None) -> np.ndarray | None:
    """Decodes routes, a .npy file in base64."""
    return None if routes is None else np.load(io.BytesIO(base64.b64decode(routes)), allow_pickle=False)
