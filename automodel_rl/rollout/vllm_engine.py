"""Generation by vLLM: in a process next to this rank, or by servers that are there.

Weights reach it as safetensors files that it reads again, under /dev/shm where there is one. vLLM is asked for
*processed* log-probabilities: the raw ones, which it gives otherwise, are those of temperature 1.
"""

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.rollout.child_process import ChildProcess
from automodel_rl.rollout.protocol import Completion, Request

WORKER = Path(__file__).with_name("vllm_worker.py")
SHARD_BYTES = 4 * 2**30
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


class VllmProcess:
    """vLLM's offline engine in a process of its own.

    Args:
        python: the interpreter of an environment that has vLLM.
        options: of vllm.LLM.
        sampling: of vllm.SamplingParams, the same for every request.
        device: its CUDA_VISIBLE_DEVICES; None leaves the environment's.
        folder: where weights are put for it; None for /dev/shm.
    """

    def __init__(
        self, python: str, options: dict[str, Any], sampling: dict[str, Any], device: str | None, folder: Path | None
    ):
        self.sampling, self.folder = sampling, folder
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else a killed worker leaves its own child behind
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        try:
            self.child = ChildProcess([python, str(WORKER)], environment)
        except OSError as error:
            raise InputError(f"rollout.vllm.python={python}: cannot start it ({error.strerror})") from None
        try:
            self._ask({"start": {**options, "logprobs_mode": "processed_logprobs"}})
        except RuntimeError as error:
            self.close()
            raise InputError(
                f"rollout.engine=vllm: it does not start ({error}): give rollout.vllm.python the interpreter of an "
                "environment with vLLM, or change rollout.vllm.memory_fraction or options"
            ) from None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if not requests:
            return []
        asked = [(request.prompt, request.seed, request.temperature) for request in requests]
        return [_completion(*parts) for parts in self._ask({"generate": asked, "sampling": self.sampling})]

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with weights_folder(tensors, self.folder) as folder:
            self._ask({"load": str(folder)})

    def close(self) -> None:
        self.child.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        """Raises RuntimeError where the worker says why it cannot, or is gone."""
        self.child.send(request)
        ok, result = self.child.receive()
        if not ok:
            raise RuntimeError(result)
        return result


class VllmServers:
    """Servers that were started with `vllm serve`, on a file system that they share with this rank.

    Args:
        urls: of the servers; requests go to them in turn.
        sampling: of vllm.SamplingParams, the same for every request.
        sends_weights: whether this rank is the one whose weights the servers get.
        folder: where weights are put for them, which they must be able to read; None for /dev/shm.
    """

    def __init__(self, urls: Sequence[str], sampling: dict[str, Any], sends_weights: bool, folder: Path | None):
        self.urls, self.sampling = [url.rstrip("/") for url in urls], sampling
        self.sends_weights, self.folder = sends_weights, folder
        for url in self.urls:
            self._check(url)
        self.model = self._get(f"{self.urls[0]}/v1/models")["data"][0]["id"]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        with ThreadPoolExecutor(SERVER_THREADS) as pool:
            completions = list(pool.map(self._complete, requests, itertools.cycle(self.urls)))
        if completions and all(completion.finish == "error" for completion in completions):
            raise RuntimeError(f"every request failed, the first with: {completions[0].error}")
        return completions

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if not self.sends_weights:
            return
        with weights_folder(tensors, self.folder) as folder:
            for url in self.urls:
                call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._post(f"{url}/collective_rpc", call)
                self._post(f"{url}/reset_prefix_cache", {})

    def close(self) -> None:
        """They were there before."""

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
        try:
            choice = self._post(f"{url}/v1/completions", body)["choices"][0]
            return _completion(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            return Completion([], [], "error", f"{url}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _check(self, url: str) -> None:
        try:
            info = json.dumps(self._get(f"{url}/server_info?config_format=json"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"rollout.vllm.servers: {url} does not answer ({error}): start it with VLLM_SERVER_DEV_MODE=1 "
                "vllm serve MODEL --logprobs-mode processed_logprobs"
            ) from None
        if "processed_logprobs" not in info:
            raise InputError(
                f"rollout.vllm.servers: {url} reports raw log-probabilities, which are wrong at any temperature but 1: "
                "start it with --logprobs-mode processed_logprobs"
            )

    def _get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=SERVER_SECONDS) as response:
            return json.load(response)

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as response:
            text = response.read()
        return json.loads(text) if text else None


def _completion(token_ids: list[int], logprobs: list[float], finish_reason: str) -> Completion:
    """vLLM's reasons are stop, length and others, such as abort, which are failures."""
    if finish_reason == "stop":
        return Completion(token_ids, logprobs, "stop")
    if finish_reason == "length":
        return Completion(token_ids, logprobs, "length")
    return Completion([], [], "error", f"vLLM ended it: {finish_reason}")


_OF_RANKS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""How variables of this job begin that vLLM would take for its own."""


@contextlib.contextmanager
def weights_folder(tensors: Iterable[tuple[str, Tensor]], parent: Path | None = None) -> Iterator[Path]:
    """A folder with the tensors as safetensors files, for as long as the block runs; in memory without a parent."""
    if parent is None and os.access("/dev/shm", os.W_OK):
        parent = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="automodel_rl_", dir=parent))
    try:
        shard: dict[str, Tensor] = {}
        number = size = 0
        for name, tensor in tensors:
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.numel() * tensor.element_size()
            if size > SHARD_BYTES:
                save_file(shard, folder / f"model-{number}.safetensors", {"format": "pt"})
                shard, number, size = {}, number + 1, 0
        if shard:
            save_file(shard, folder / f"model-{number}.safetensors", {"format": "pt"})
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
