"""Generation by vLLM: in a process next to this rank, or by servers that are there.

vLLM is asked for *processed* log-probabilities: the raw ones, which it gives otherwise, are those of temperature 1.
"""

import base64
import io
import itertools
import json
import os
import sys
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from automodel_rl.errors import InputError, WeightSyncError, innermost
from automodel_rl.rollout.engine_process import EngineProcess, completion_of
from automodel_rl.rollout.protocol import Completion, Request
from automodel_rl.weight_sync.channel import Message

WORKER = Path(__file__).with_name("vllm_worker.py")
SERVER_SECONDS = 3600.0
SERVER_THREADS = 64

WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said with every request, for a server fills in what is not said from the checkpoint's generation_config.json."""


def start_vllm(
    python: str | None, options: dict[str, Any], sampling: dict[str, Any], device: str | None
) -> EngineProcess:
    """vLLM's offline engine in a process of its own.

    Args:
        python: the interpreter of an environment that has vLLM; None for this one's.
        options: of vllm.LLM.
        sampling: of vllm.SamplingParams, the same for every request.
        device: its CUDA_VISIBLE_DEVICES; None leaves the environment's.

    Raises:
        InputError: it does not start.
    """
    python = python or sys.executable
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else a killed worker leaves its own child behind
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    start: Message = ("start", {**options, "logprobs_mode": "processed_logprobs"}, sampling)
    try:
        return EngineProcess([python, str(WORKER)], environment, start)
    except OSError as error:
        raise InputError(f"rollout.vllm.python={python}: cannot start it ({error.strerror})") from None
    except RuntimeError as error:
        raise InputError(
            f"rollout.engine=vllm: it does not start ({error}): give rollout.vllm.python the interpreter of an "
            "environment with vLLM, or change rollout.vllm.memory_fraction or options"
        ) from None


TOKEN_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the token of the servers, which vLLM reads, too."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

ANSWER_BYTES = 2**30
"""Longest answer of a server."""

_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""How variables of this job begin that vLLM would take for its own."""


class VllmServers:
    """Servers that were started with `vllm serve`: a `RolloutEngine`, and the `VllmChannel` of their weights.

    Args:
        urls: of the servers; requests go to them in turn.
        sampling: of vllm.SamplingParams, the same for every request.
        leads: whether this rank tells them of weights; others only keep count of versions.
        routes: they have to say which experts tokens go to.
    """

    def __init__(self, urls: Sequence[str], sampling: dict[str, Any], leads: bool = True, routes: bool = False):
        self.leads, self.routes = leads, routes
        self.urls, self.sampling = [url.rstrip("/") for url in urls], sampling
        for url in self.urls:
            self._check(url)
        self.model = self._get(f"{self.urls[0]}/v1/models")["data"][0]["id"]
        self.version = 0
        self._requests = ThreadPoolExecutor(SERVER_THREADS)
        self._orders = ThreadPoolExecutor(1)  # one after the other
        self._answers: deque[Message] = deque()
        self._broken = False

    @property
    def num_workers(self) -> int:
        """Processes of all servers that hold weights; of the rank that leads."""
        return sum(self._world_sizes()) if self.leads else 0

    def submit(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]:
        if self._broken:
            raise WeightSyncError("a server has no complete weights, for an update failed: start the servers anew")
        futures = [
            self._requests.submit(self._complete, request, url)
            for request, url in zip(requests, itertools.cycle(self.urls), strict=False)
        ]

        def wait() -> list[Completion]:
            completions = [future.result() for future in futures]
            if completions and all(completion.finish == "error" for completion in completions):
                raise RuntimeError(f"every request failed, the first with: {completions[0].error}")
            return completions

        return wait

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.submit(requests)()

    def close(self) -> None:
        """The servers were there before."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._orders.shutdown(wait=False, cancel_futures=True)

    def tell(self, message: Message) -> None:
        if not self.leads:
            self._follow(message)
            return
        try:
            self._orders.submit(self._obey, message)
        except RuntimeError:
            raise WeightSyncError("the servers are given up") from None

    def ready(self) -> bool:
        return bool(self._answers)

    def hear(self) -> Message:
        return self._answers.popleft()

    def _obey(self, message: Message) -> None:
        """Passes what is said of weights on to all servers; running requests wait, and go on with new keys and values.
        A server whose update fails has no whole weights, and nothing but a restart gives it some."""
        kind, *rest = message
        try:
            if kind == "init":
                self._init(rest[0])
                self._answers.append(("ready",))
            elif kind == "begin":
                self.coming, self._broken = rest[0], False
                self._to_all("/pause?mode=keep", {})
                self._to_all("/start_weight_update", {"is_checkpoint_format": True})
            elif kind == "update" and not self._broken:
                self._to_all("/update_weights", {"update_info": rest[0]})
                self._answers.append(("taken",))
            elif kind == "commit" and not self._broken:
                self._to_all("/finish_weight_update", {})
                self.version = self.coming
                self._to_all("/resume", {})
                self._answers.append(("committed", self.version, None))
        except Exception as error:
            self._broken = True
            self._answers.append(("error", innermost(error)))

    def _follow(self, message: Message) -> None:
        """What another rank tells the servers."""
        kind, *rest = message
        if kind == "begin":
            self.coming = rest[0]
        elif kind == "commit":
            self.version = self.coming
            self._answers.append(("committed", self.version, None))
        elif kind in _ANSWERS:
            self._answers.append((_ANSWERS[kind],))

    def _init(self, info: dict[str, Any]) -> None:
        offsets = itertools.accumulate(self._world_sizes(), initial=info["rank_offset"])
        bodies = [{"init_info": {**info, "rank_offset": offset}} for offset in offsets]
        with ThreadPoolExecutor(len(self.urls)) as pool:
            pairs = zip(self.urls, bodies, strict=False)
            list(pool.map(lambda pair: self._post(f"{pair[0]}/init_weight_transfer_engine", pair[1]), pairs))

    def _world_sizes(self) -> list[int]:
        return [self._get(f"{url}/get_world_size?include_dp=true")["world_size"] for url in self.urls]

    def _to_all(self, path: str, body: dict[str, Any]) -> None:
        with ThreadPoolExecutor(len(self.urls)) as pool:
            list(pool.map(lambda url: self._post(url + path, body), self.urls))

    def _complete(self, request: Request, url: str) -> Completion:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "seed": request.seed,
            "temperature": request.temperature,
            "logprobs": 1,
            "return_token_ids": True,
            **WHOLE_DISTRIBUTION,
            **self.sampling,
        }
        oldest = self.version
        try:
            choice = self._post(f"{url}/v1/completions", body)["choices"][0]
            scores = choice["logprobs"]["token_logprobs"]
            routes = _decoded(choice.get("routed_experts"))
            return completion_of(choice["token_ids"], scores, choice["finish_reason"], oldest, self.version, routes)
        except (OSError, ValueError, LookupError, TypeError) as error:
            return Completion([], [], "error", f"{url}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _check(self, url: str) -> None:
        host = urllib.parse.urlsplit(url).hostname or ""
        if host not in LOOPBACK and TOKEN_VARIABLE not in os.environ:
            raise InputError(
                f"rollout.vllm.servers: {url} is not on this machine, so whoever reaches it could use it: start it "
                f"with --api-key and set {TOKEN_VARIABLE} to that key"
            )
        try:
            info = json.dumps(self._get(f"{url}/server_info?config_format=json"))
        except (OSError, ValueError) as error:
            raise InputError(f"rollout.vllm.servers: {url} does not answer ({error}): start it with {SERVE}") from None
        if self._get(f"{url}/is_paused")["is_paused"]:
            raise InputError(
                f"rollout.vllm.servers: {url} is paused, as after an update of its weights that failed: start it anew"
            )
        if self.routes and '"enable_return_routed_experts": true' not in info:
            raise InputError(
                f"rollout.vllm.servers: {url} does not say which experts its tokens go to, which router_replay needs: "
                f"start it with {SERVE} --enable-return-routed-experts"
            )
        if "processed_logprobs" not in info:
            raise InputError(
                f"rollout.vllm.servers: {url} reports raw log-probabilities, which are wrong at any temperature but 1: "
                f"start it with {SERVE}"
            )

    def _get(self, url: str) -> Any:
        return self._answer(urllib.request.Request(url, headers=_authorization()))

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", **_authorization()}
        return self._answer(urllib.request.Request(url, json.dumps(body).encode(), headers))

    def _answer(self, request: urllib.request.Request) -> Any:
        with _OPENER.open(request, timeout=SERVER_SECONDS) as response:
            text = response.read(ANSWER_BYTES + 1)
        if len(text) > ANSWER_BYTES:
            raise ValueError(f"the answer is longer than {ANSWER_BYTES} bytes")
        return json.loads(text) if text else None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A server may not send the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _authorization() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _decoded(routes: str | None) -> np.ndarray | None:
    """The array in base64 of the bytes of a .npy file."""
    return None if routes is None else np.load(io.BytesIO(base64.b64decode(routes)), allow_pickle=False)


_ANSWERS = {"init": "ready", "update": "taken"}

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)
