"""OpenAI's /v1/completions and /v1/chat/completions, for evaluation harnesses and environments."""

import asyncio
import dataclasses
import functools
import secrets
import time
from typing import Any

from automodel_rl.chat_api.openai_requests import SamplingRequest
from automodel_rl.config import ServeConfig
from automodel_rl.data.stop_tokens import completion_stop_ids
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.rollout.openai_answers import OpenAIAnswers
from automodel_rl.rollout.sampled import Sampled, SamplePrompt
from automodel_rl.serve import checks
from automodel_rl.serve.ranks import RanksLostError, RefusedError
from automodel_rl.serve.requests import ChunkBody, PromptBody, SampleBody, SamplingBody
from automodel_rl.serve.service import Service
from automodel_rl.serve.tables import BusyError, UnknownError, Weights

CLIENTS = "v1"
"""Session shared by all clients of OpenAI's API."""


class Completions:
    """Samples for requests of OpenAI's API."""

    def __init__(self, service: Service, config: ServeConfig):
        self.service, self.config = service, config
        self._began = time.time()

    @functools.cached_property
    def answers(self) -> OpenAIAnswers:
        """Builder of answers. Opens the tokenizer at the first request."""
        model = OpenedModel.open(self.config.model)
        tokenizer = model.tokenizer()
        return OpenAIAnswers(tokenizer, completion_stop_ids(model.files.folder, model.whole, tokenizer), self._sample)

    @property
    def models(self) -> dict[str, Any]:
        saved = [_model(one.path, one.created) for one in self.service.saved.all]
        return {"object": "list", "data": [_model(self.config.base_name, self._began), *saved]}

    def model(self, name: str) -> dict[str, Any]:
        """Describes a model. Raises InputError or UnknownError if it does not exist or cannot be sampled from."""
        saved = self._weights(name).saved
        return _model(name, self._began if saved is None else saved.created)

    def _check_size(self, num_prompts: int, n: int) -> None:
        limits = self.config.limits
        if num_prompts * n > limits.sequences:
            raise InputError(
                f"{num_prompts} prompts with n={n}: at most {limits.sequences} sequences (limits.sequences)"
            )

    async def _sample(
        self,
        body: SamplingRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        *,
        with_logprobs: bool,
        num_top: int,
    ) -> list[Sampled]:
        self._check_size(len(prompts), body.n)
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
        if max_tokens == 0:  # only scores the prompts
            jobs = [dataclasses.replace(job, num_samples=0) for job in jobs]
        results, request = self.service.results, f"{CLIENTS}:{secrets.token_hex(8)}"
        results.open(request, b"", sum(map(checks.bytes_of_prompt, jobs)))
        try:
            found = await asyncio.wrap_future(self.service.ranks.submit(self.service.samplers.job(weights, jobs)))
        except RefusedError as error:
            raise InputError(str(error)) from None
        except RanksLostError:
            raise BusyError("the ranks exited while sampling and are being restarted: try again") from None
        finally:
            results.forget(request)
        self.service.history.add_samples(body.model, jobs, found)
        return found

    def _weights(self, name: str) -> Weights:
        if name == self.config.base_name:
            return Weights()
        if not name.startswith("tinker://"):
            raise UnknownError(
                f"unknown model {name!r}: use {self.config.base_name}, or the tinker:// path of saved weights"
            )
        return Weights(saved=self.service.saved.usable(name))


def _model(name: str, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "local"}
