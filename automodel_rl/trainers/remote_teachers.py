"""Teachers behind servers: vLLM's, and those that speak Tinker's API."""

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

REQUESTS_AT_ONCE = 64
"""Most rows that a server has at once. Each is a thread that waits."""

TRIES = 25
"""Attempts at a row, each after twice as long a wait as the one before, at most `LONGEST_WAIT`: ten minutes in all, in
which a server can be started again."""

LONGEST_WAIT = 30.0
"""Seconds."""


class RemoteTeacher(ABC):
    """A model behind a server, as a teacher. Methods are those of `Policy`, at temperature 1, in fp32.

    Args:
        key: the section of the config that asks for it, for errors.
        vocab_size: number of its token ids.
    """

    def __init__(self, key: str, vocab_size: int):
        self.key, self.vocab_size = key, vocab_size

    def on_device(self) -> AbstractContextManager[None]:
        """Nothing: it is always ready."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Lets go of the server."""

    @abstractmethod
    def top_of(self, tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
        """The k largest log-probabilities for each token but the first, and their ids, [n - 1, k]."""

    @abstractmethod
    def own_of(self, tokens: list[int]) -> list[float]:
        """The log-probabilities of a row's tokens but the first."""

    @abstractmethod
    def at_of(self, tokens: list[int], ids: Tensor) -> Tensor:
        """Log-probabilities of other tokens, [n - 1, K]; `ids` has -1 for none."""

    def top_logprobs(self, batch: Batch, k: int, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """The likeliest tokens of rows, as `Policy.top_logprobs`. Raises InputError if the server gives no answer."""
        _check(temperature)
        found = self._of_rows(lambda row: self.top_of(row.input_ids.tolist(), k), batch.sequences)
        return [(_after_first(values, 0.0), _after_first(ids, 0)) for values, ids in found]

    def logprobs(self, batch: Batch, temperature: float = 1.0, *, ids: str | None = None) -> list[Tensor]:
        """Log-probabilities of the rows' tokens, as `Policy.logprobs`. Raises InputError if a server fails."""
        _check(temperature)
        if ids is None:
            own = self._of_rows(lambda row: torch.tensor(self.own_of(row.input_ids.tolist())), batch.sequences)
            return [_after_first(values, 0.0) for values in own]
        at = self._of_rows(lambda row: self.at_of(row.input_ids.tolist(), row.values[ids][1:]), batch.sequences)
        return [_after_first(values, 0.0) for values in at]

    def _of_rows(self, ask: Callable[[Any], T], rows: Sequence[Any]) -> list[T]:
        """What a function says of each row; many are asked at once. Raises InputError for rows with images or clips."""
        if any(row.media for row in rows):
            raise InputError(
                f"{self.key}.url: rows have images or clips, which are not sent: use a teacher without url"
            )
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            return [*pool.map(ask, rows)]


def _check(temperature: float) -> None:
    if temperature != 1.0:
        raise ValueError(f"temperature={temperature}: servers give log-probabilities at 1")


def _after_first(values: Tensor, filling: float) -> Tensor:
    """Values of a row's tokens but the first, with that of the first before them."""
    return torch.cat([values.new_full((1, *values.shape[1:]), filling), values])


class VllmTeacher(RemoteTeacher):
    """A model behind `vllm serve`, which scores prompts of token ids.

    Args:
        key, vocab_size: as those of `RemoteTeacher`.
        url: the server's address.
        name: the model's name there.
    """

    def __init__(self, key: str, vocab_size: int, url: str, name: str):
        super().__init__(key, vocab_size)
        self.server, self.name = VllmServer(url), name
        served = [one["id"] for one in self._tried(lambda: self.server.get("/v1/models"))["data"]]
        if name not in served:
            raise InputError(f"{key}.name={name}: {url} has {', '.join(served)}: name one of them")

    def close(self) -> None: ...  # each request has a connection of its own

    def top_of(self, tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
        rows = [_ranked(of_token)[:k] for of_token in self._scored(tokens, k)]
        if any(len(row) < k for row in rows):
            raise InputError(f"{self.key}.url={self.server.url}: gives fewer than {k} likeliest tokens: lower top_k")
        values = torch.tensor([[value for _, value in row] for row in rows]).view(-1, k)
        return values, torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64).view(-1, k)

    def own_of(self, tokens: list[int]) -> list[float]:
        scored = self._scored(tokens, 0)
        return [of_token[str(token)]["logprob"] for token, of_token in zip(tokens[1:], scored, strict=True)]

    def at_of(self, tokens: list[int], ids: Tensor) -> Tensor:
        raise NotImplementedError("vLLM scores its own likeliest tokens")  # configs that would ask are refused

    def _scored(self, tokens: list[int], k: int) -> list[dict[str, Any]]:
        body = {"model": self.name, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        answer = self._tried(lambda: self.server.post("/v1/completions", body))
        (choice,) = answer["choices"]
        scored: list[dict[str, Any]] = choice["prompt_logprobs"][1:]
        return scored

    def _tried(self, ask: Callable[[], T]) -> T:
        """What the server answers, after some tries. Raises InputError with what it says if it refuses."""
        problem = ""
        for attempt in range(TRIES):
            try:
                return ask()
            except urllib.error.HTTPError as error:
                problem = _message(error)
                if error.code < 500 and error.code not in (408, 429):
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:  # gone, or gone in the midst of an answer
                problem = f"{type(error).__name__}: {error}"
            if attempt == 3:
                print(f"warning: {self.key}: {problem}; asking again for ten minutes", file=sys.stderr, flush=True)
            if attempt < TRIES - 1:
                time.sleep(min(0.5 * 2**attempt, LONGEST_WAIT))
        raise InputError(f"{self.key}.url={self.server.url}: {problem}")


def _message(error: urllib.error.HTTPError) -> str:
    """What a server says of a request that it refuses."""
    text = error.read(10_000).decode(errors="replace")
    try:
        found = json.loads(text)
        text = str(found.get("error", {}).get("message") or found.get("message") or text)
    except (ValueError, AttributeError):
        pass
    return f"{error.code} {' '.join(text.split())[:300]}"


def _ranked(of_token: dict[str, Any]) -> list[tuple[int, float]]:
    """Tokens and log-probabilities, the likeliest first; the row's own comes last if it is not among them."""
    by_rank = sorted(of_token.items(), key=lambda one: one[1]["rank"])
    return [(int(token), one["logprob"]) for token, one in by_rank]


class TinkerTeacher(RemoteTeacher):
    """A model behind a server that speaks Tinker's API.

    Args:
        key, vocab_size: as those of `RemoteTeacher`.
        url: the server's address.
        name: the base model's name there, or the tinker:// path of weights.
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
        self._client.holder.close()  # else its heartbeat goes on for as long as the process, and complains in the end

    def top_of(self, tokens: list[int], k: int) -> tuple[Tensor, Tensor]:
        found = self._scored(tokens, include_prompt_logprobs=True, topk_prompt_logprobs=k).topk_prompt_logprobs_np
        return torch.from_numpy(found.logprobs[1:]), torch.from_numpy(found.token_ids[1:]).long()

    def own_of(self, tokens: list[int]) -> list[float]:
        values: list[float] = self._scored(tokens, include_prompt_logprobs=True).prompt_logprobs[1:]
        return values

    def at_of(self, tokens: list[int], ids: Tensor) -> Tensor:
        asked = self._tinker.TensorData.from_torch(ids.contiguous())
        found: Tensor = self._scored(tokens, target_prompt_logprobs=asked).target_prompt_logprobs.to_torch()
        return found

    def _scored(self, tokens: list[int], **asked: Any) -> Any:
        types = self._tinker.types
        prompt, params = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=1)
        return self._asked(lambda: self._sampler.sample(prompt, 1, params, **asked).result())

    def _asked(self, ask: Callable[[], T]) -> T:
        """What the client answers, which tries again by itself. Raises InputError if it gives up."""
        try:
            return ask()
        except (self._tinker.TinkerError, ValueError) as error:
            raise InputError(f"{self.key}.url={self._url}: {' '.join(str(error).split())[:300]}") from None


def open_remote_teacher(key: str, config: TeacherConfig, tokenizer: PreTrainedTokenizerBase) -> RemoteTeacher:
    """A teacher behind a server.

    Args:
        key: the section of the config that asks for it.
        config: this section.
        tokenizer: the student's tokenizer.

    Raises:
        InputError: its tokenizer is another one, or the server does not answer.
    """
    try:
        own, size = AutoTokenizer.from_pretrained(config.path), _vocab_size(config.path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{key}.path={config.path}: no tokenizer and config can be opened ({reason})") from None
    try:
        check_same_tokens(tokenizer, own)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    kind = VllmTeacher if config.api == "vllm" else TinkerTeacher
    return kind(key, size, str(config.url), config.name or config.path)


def _vocab_size(path: str) -> int:
    size: int = language_config(AutoConfig.from_pretrained(path)).vocab_size
    return size
