"""Teachers behind servers: vLLM's, and those with Tinker's API."""

import http.client
import importlib
import json
import sys
import time
import urllib.error
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from automodel_rl.batch import Batch
from automodel_rl.config.further_models import TeacherConfig
from automodel_rl.errors import InputError
from automodel_rl.families.known import language_config
from automodel_rl.generators.vllm_http import VllmServer
from automodel_rl.hf.tokenizer import check_same_tokens

T = TypeVar("T")

MAX_CONCURRENT_REQUESTS = 64
"""Maximum number of concurrent requests to a server, each in a thread."""

TRIES = 25
"""Attempts per row. The wait doubles up to `LONGEST_WAIT`: ten minutes in all, in which a server can be restarted."""

LONGEST_WAIT = 30.0


class RemoteTeacher(ABC):
    """A teacher model behind a server. Methods are those of `Policy`, at temperature 1, in fp32.

    Args:
        key: the config section that names it, for errors.
    """

    def __init__(self, key: str, vocab_size: int):
        self.key, self.vocab_size = key, vocab_size

    def on_device(self) -> AbstractContextManager[None]:
        """Does nothing: a server is always ready."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Closes the connection to the server."""

    @abstractmethod
    def row_top_logprobs(self, tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
        """Returns the k largest log-probabilities for each token but the first, and their ids, [n - 1, k]."""

    @abstractmethod
    def row_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probabilities of a row's tokens but the first."""

    @abstractmethod
    def row_logprobs_at(self, tokens: list[int], ids: Tensor) -> Tensor:
        """Returns log-probabilities of other tokens, [n - 1, K]; `ids` has -1 for none."""

    def top_logprobs(self, batch: Batch, k: int, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Same as `Policy.top_logprobs`. Raises InputError if the server fails."""
        _check(temperature)
        found = self._of_rows(lambda row: self.row_top_logprobs(row.input_ids.tolist(), k), batch.sequences)
        return [(_after_first(values, 0.0), _after_first(ids, 0)) for values, ids in found]

    def logprobs(self, batch: Batch, temperature: float = 1.0, *, ids: str | None = None) -> list[Tensor]:
        """Same as `Policy.logprobs`. Raises InputError if the server fails."""
        _check(temperature)
        if ids is None:
            own = self._of_rows(lambda row: torch.tensor(self.row_logprobs(row.input_ids.tolist())), batch.sequences)
            return [_after_first(values, 0.0) for values in own]
        at = self._of_rows(
            lambda row: self.row_logprobs_at(row.input_ids.tolist(), row.values[ids][1:]), batch.sequences
        )
        return [_after_first(values, 0.0) for values in at]

    def _of_rows(self, ask: Callable[[Any], T], rows: Sequence[Any]) -> list[T]:
        """Calls a function on each row, concurrently. Raises InputError for rows with images or clips."""
        if any(row.media for row in rows):
            raise InputError(f"{self.key}.url: rows with images or clips are not supported: use a teacher without url")
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            return [*pool.map(ask, rows)]


def _check(temperature: float) -> None:
    if temperature != 1.0:
        raise ValueError(f"temperature={temperature}: servers return log-probabilities at temperature 1")


def _after_first(values: Tensor, filling: float) -> Tensor:
    """Prepends a value for a row's first token."""
    return torch.cat([values.new_full((1, *values.shape[1:]), filling), values])


class VllmTeacher(RemoteTeacher):
    """A model behind `vllm serve`, which scores prompts of token ids.

    Args:
        name: the model's name on the server.
    """

    def __init__(self, key: str, vocab_size: int, url: str, name: str):
        super().__init__(key, vocab_size)
        self.server, self.name = VllmServer(url), name
        served = [one["id"] for one in self._with_retries(lambda: self.server.get("/v1/models"))["data"]]
        if name not in served:
            raise InputError(f"{key}.name={name}: {url} serves {', '.join(served)}: use one of them")

    def close(self) -> None: ...  # each request uses its own connection

    def row_top_logprobs(self, tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
        rows = [_ranked(of_token)[:k] for of_token in self._scored(tokens, k)]
        if any(len(row) < k for row in rows):
            raise InputError(f"{self.key}.url={self.server.url}: returns fewer than {k} top tokens: lower top_k")
        values = torch.tensor([[value for _, value in row] for row in rows]).view(-1, k)
        return values, torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64).view(-1, k)

    def row_logprobs(self, tokens: list[int]) -> list[float]:
        scored = self._scored(tokens, 0)
        return [of_token[str(token)]["logprob"] for token, of_token in zip(tokens[1:], scored, strict=True)]

    def row_logprobs_at(self, tokens: list[int], ids: Tensor) -> Tensor:
        raise NotImplementedError("vLLM only scores its own top tokens")  # configs that need this are refused

    def _scored(self, tokens: list[int], k: int) -> list[dict[str, Any]]:
        body = {"model": self.name, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        answer = self._with_retries(lambda: self.server.post("/v1/completions", body))
        (choice,) = answer["choices"]
        scored: list[dict[str, Any]] = choice["prompt_logprobs"][1:]
        return scored

    def _with_retries(self, ask: Callable[[], T]) -> T:
        """Calls the server, with retries. Raises InputError if it refuses or stays unreachable."""
        problem = ""
        for attempt in range(TRIES):
            try:
                return ask()
            except urllib.error.HTTPError as error:
                problem = _message(error)
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:  # unreachable, or lost while answering
                problem = f"{type(error).__name__}: {error}"
            if attempt == 3:
                print(f"warning: {self.key}: {problem}; retrying for up to ten minutes", file=sys.stderr, flush=True)
            if attempt < TRIES - 1:
                time.sleep(min(0.5 * 2**attempt, LONGEST_WAIT))
        raise InputError(f"{self.key}.url={self.server.url}: {problem}")


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read(10_000).decode(errors="replace")
    try:
        found = json.loads(text)
        text = str(found.get("error", {}).get("message") or found.get("message") or text)
    except (ValueError, AttributeError):
        pass
    return f"{error.code} {' '.join(text.split())[:300]}"


def _ranked(of_token: dict[str, Any]) -> list[tuple[int, float]]:
    """Returns tokens and log-probabilities, most likely first. The row's own token is last if it is not among the
    top."""
    by_rank = sorted(of_token.items(), key=lambda one: one[1]["rank"])
    return [(int(token), one["logprob"]) for token, one in by_rank]


class TinkerTeacher(RemoteTeacher):
    """A model behind a server with Tinker's API.

    Args:
        name: the base model's name on the server, or the tinker:// path of weights.
    """

    def __init__(self, key: str, vocab_size: int, url: str, name: str):
        super().__init__(key, vocab_size)
        try:
            self._tinker = importlib.import_module("tinker")
        except ImportError:
            raise InputError(f"{key}.api=tinker needs Tinker's client: pip install tinker") from None
        named = {"model_path": name} if name.startswith("tinker://") else {"base_model": name}
        self._url = url
        self._client = self._asked(lambda: self._tinker.ServiceClient(base_url=url))
        try:
            self._sampler = self._asked(lambda: self._client.create_sampling_client(**named).result())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._client.holder.close()  # otherwise its heartbeat runs until the process exits, and reports an error then

    def row_top_logprobs(self, tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
        found = self._scored(tokens, include_prompt_logprobs=True, topk_prompt_logprobs=k).topk_prompt_logprobs_np
        return torch.from_numpy(found.logprobs[1:]), torch.from_numpy(found.token_ids[1:]).long()

    def row_logprobs(self, tokens: list[int]) -> list[float]:
        values: list[float] = self._scored(tokens, include_prompt_logprobs=True).prompt_logprobs[1:]
        return values

    def row_logprobs_at(self, tokens: list[int], ids: Tensor) -> Tensor:
        asked = self._tinker.TensorData.from_torch(ids.contiguous())
        found: Tensor = self._scored(tokens, target_prompt_logprobs=asked).target_prompt_logprobs.to_torch()
        return found

    def _scored(self, tokens: list[int], **asked: Any) -> Any:
        types = self._tinker.types
        prompt, params = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=1)
        return self._asked(lambda: self._sampler.sample(prompt, 1, params, **asked).result())

    def _asked(self, ask: Callable[[], T]) -> T:
        """Calls the client, which retries by itself. Raises InputError if it gives up."""
        try:
            return ask()
        except (self._tinker.TinkerError, ValueError) as error:
            raise InputError(f"{self.key}.url={self._url}: {' '.join(str(error).split())[:300]}") from None


def open_remote_teacher(key: str, config: TeacherConfig, tokenizer: PreTrainedTokenizerBase) -> RemoteTeacher:
    """Opens a teacher behind a server.

    Args:
        key: the config section that names it.
        tokenizer: the student's tokenizer.

    Raises:
        InputError: its tokenizer differs, or the server does not answer.
    """
    try:
        own, size = AutoTokenizer.from_pretrained(config.path), _vocab_size(config.path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{key}.path={config.path}: cannot open a tokenizer and config ({reason})") from None
    try:
        check_same_tokens(tokenizer, own)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    kind = VllmTeacher if config.api == "vllm" else TinkerTeacher
    return kind(key, size, str(config.url), config.name or config.path)


def _vocab_size(path: str) -> int:
    size: int = language_config(AutoConfig.from_pretrained(path)).vocab_size
    return size
