"""Generation with a whole transformers model, in left-padded batches with a key-value cache."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from automodel_rl.compat.modules import with_cache
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.media_inputs import MediaInputs, next_positions
from automodel_rl.generators.model_copy import ModelCopy, RouteRecorder, build_model, synced_tensors
from automodel_rl.generators.protocol import Completion, RankGenerator, fail_unfinished
from automodel_rl.weight_sync.receiver import Receiver

STOP_TEXT_TOKENS = 32
"""Number of last tokens searched for stop texts, in addition to one per byte of the longest text."""


@dataclass(frozen=True)
class TransformersSettings:
    """Settings for writing completions.

    Attributes:
        tokenizer: decodes tokens to find stop texts.
        batch_size: number of requests in a batch.
        ends: end tokens of requests whose `stop_token_ids` is None.
    """

    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    ends: tuple[int, ...] = ()


class TransformersGenerator(RankGenerator):
    """Samples from a transformers model.

    Attributes:
        receiver: the model's tensors for weight syncs.

    Raises:
        InputError: the device has not enough memory for the model.
    """

    writes_in_background = False

    def __init__(self, copy: ModelCopy, writing: TransformersSettings):
        self.copy, self.writing = copy, writing
        self._submitted: list[tuple[Sequence[Request], list[Future[Completion]]]] = []
        self.media = MediaInputs(copy.config, copy.media)
        self.model = build_model(copy)
        self.receiver = Receiver(synced_tensors(self.model, copy))
        self.recorder = RouteRecorder.of(self.model, copy.family) if copy.capture_routes else None

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        completions: list[Future[Completion]] = [Future() for _ in requests]
        self._submitted.append((requests, completions))
        return completions

    def write(self) -> None:
        submitted, self._submitted = self._submitted, []
        for requests, completions in submitted:
            try:
                self.generate(requests, on_finished=functools.partial(_complete, completions))
            except Exception as error:
                fail_unfinished(completions, error)

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        between_tokens: Callable[[], None] = lambda: None,
        on_finished: Callable[[int, Completion], None] = lambda index, completion: None,
    ) -> list[Completion]:
        """Writes completions.

        Args:
            between_tokens: called before every token. It may load new weights, with which completions continue; the
                cache of earlier tokens is kept (as in PipelineRL, arXiv:2509.19128).
            on_finished: called with each completion and its index once its batch is written.

        Raises:
            WeightSyncError: the weights are incomplete.
        """
        # Sorted by length to reduce padding.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        done: dict[int, Completion] = {}
        for start in range(0, len(order), self.writing.batch_size):
            places = order[start : start + self.writing.batch_size]
            batch = self._batch([requests[i] for i in places], between_tokens)
            for place, completion in zip(places, batch, strict=True):
                done[place] = completion
                on_finished(place, completion)
        return [done[i] for i in range(len(requests))]

    def close(self) -> None:
        """Does nothing: no process was started."""

    def _batch(self, requests: list[Request], between_tokens: Callable[[], None]) -> list[Completion]:
        uniforms = self._uniforms(requests)
        temperatures = torch.tensor(
            [r.sampling.temperature for r in requests], dtype=torch.float64, device=self.copy.device
        )
        inputs = self._prompts(requests)
        longest = inputs["input_ids"].shape[1]
        cache = DynamicCache(config=self.model.config)
        written: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        finish = ["length"] * len(requests)
        limits = [request.sampling.max_tokens for request in requests]
        rows = list(range(len(requests)))  # unfinished requests, in the order of the batch's rows
        versions: list[int] = []
        routes: list[list[np.ndarray]] = [[] for _ in requests]
        leaves_out = any(request.sampling.is_truncated for request in requests)
        for step in range(max(limits)):
            between_tokens()
            versions.append(self.receiver.complete_version())
            output = self.model(**inputs, **with_cache(cache), logits_to_keep=1)
            if self.recorder is not None:
                for row, experts in zip(rows, self.recorder.take(len(rows)), strict=True):
                    routes[row].append(experts if step else experts[longest - len(requests[row].prompt) :])
            logits = output.logits[:, -1]
            if leaves_out:
                logits = _truncated(logits, [requests[row] for row in rows])
            chosen, scores = _sample(logits, temperatures[rows], uniforms[rows, step])
            for row, token, score in zip(rows, chosen.tolist(), scores.tolist(), strict=True):
                written[row].append(token)
                logprobs[row].append(score)
                if self._is_stop(written[row], requests[row].sampling):
                    finish[row] = "stop"
            keep = [
                place for place, row in enumerate(rows) if finish[row] == "length" and len(written[row]) < limits[row]
            ]
            if not keep:
                break
            mask = inputs["attention_mask"][keep]
            inputs = {  # media are in the cache by now
                "input_ids": chosen[keep, None],
                "attention_mask": torch.cat([mask, mask.new_ones(len(keep), 1)], dim=1),
                "position_ids": next_positions(inputs["position_ids"][..., keep, :]),
            }
            if len(keep) < len(rows):
                cache.reorder_cache(torch.tensor(keep, device=self.copy.device))
                rows = [rows[place] for place in keep]
        return [
            Completion(
                written[row],
                logprobs[row],
                finish[row],  # type: ignore[arg-type]
                versions=(versions[0], versions[len(written[row]) - 1]),
                routes=np.concatenate(routes[row]) if routes[row] else None,
            )
            for row in range(len(requests))
        ]

    def _prompts(self, requests: list[Request]) -> dict[str, Tensor]:
        """Returns the model's arguments for a batch of left-padded prompts."""
        longest = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros(len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        positions = self.media.positions(requests, longest)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs = {name: tensor.to(self.copy.device) for name, tensor in inputs.items()}
        return inputs | self.media.of(requests, inputs["input_ids"], self.copy.dtype)

    def _uniforms(self, requests: list[Request]) -> Tensor:
        """Draws numbers in [0, 1), one per token, from each request's seed: float64 [requests, most tokens]."""
        most = max(request.sampling.max_tokens for request in requests)
        drawn = [np.random.default_rng(request.seed).random(most) for request in requests]
        return torch.from_numpy(np.stack(drawn)).to(self.copy.device)

    def _is_stop(self, token_ids: list[int], sampling: Sampling) -> bool:
        if token_ids[-1] in (self.writing.ends if sampling.stop_token_ids is None else sampling.stop_token_ids):
            return True
        if not sampling.stop:
            return False
        longest = max(len(stop.encode()) for stop in sampling.stop)  # a token is at least one byte
        text = self.writing.tokenizer.decode(token_ids[-STOP_TEXT_TOKENS - longest :])
        return any(stop in text for stop in sampling.stop)


def _complete(completions: "Sequence[Future[Completion]]", index: int, completion: Completion) -> None:
    completions[index].set_result(completion)


def _truncated(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Sets logits [B, V] to -inf that a request's top_k, and then its top_p at its temperature, exclude."""
    kept = logits.to(torch.promote_types(logits.dtype, torch.float32)).clone()
    for row, request in zip(kept, requests, strict=True):
        sampling = request.sampling
        if sampling.top_k:
            row[row < row.topk(min(sampling.top_k, len(row))).values[-1]] = -torch.inf
        if sampling.top_p < 1:
            probabilities, order = (row / sampling.temperature).softmax(0).sort(descending=True)
            row[order[probabilities.cumsum(0) - probabilities >= sampling.top_p]] = -torch.inf
    return kept


def _sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a token per sequence. Returns token ids [B] and their log-probabilities [B].

    Inverts the CDF: takes the first token whose cumulative probability exceeds the uniform number, so that a
    sequence's token does not depend on the rest of the batch.

    Args:
        logits: [B, V].
        temperatures: [B], float64. 0 takes the most likely token and scores it at temperature 1.
        uniforms: [B], in [0, 1), float64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_greedy = temperatures == 0
    logprobs = (logits / temperatures.where(~is_greedy, 1.0).to(logits.dtype)[:, None]).log_softmax(1)
    cumulated = logprobs.exp().cumsum(1, dtype=torch.float64)
    inverted = torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]
    chosen = torch.where(is_greedy, logprobs.argmax(1), inverted.clamp_max(logits.shape[1] - 1))
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]
