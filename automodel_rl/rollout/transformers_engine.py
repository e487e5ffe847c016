"""Generation in this process, with a copy of the whole model: batches with a key-value cache, left-padded."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.names import to_hf
from automodel_rl.hf.read import persistent_tensors
from automodel_rl.lora.layers import add_adapters, install_adapters, is_adapter
from automodel_rl.mixture.routers import routers_of
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.rollout.protocol import Completion, Request
from automodel_rl.support.description import describe_model
from automodel_rl.support.families import FAMILIES
from automodel_rl.weight_sync.receiver import Receiver

STOP_TEXT_TOKENS = 32
"""Newest tokens in which stop texts are looked for."""


class TransformersEngine:
    """Samples from a transformers model.

    Args:
        config: of the model.
        dtype: that it computes in.
        device: where it computes.
        tokenizer: for stop texts and the end-of-sequence token.
        max_new_tokens: longest completion.
        stop: texts that end a completion.
        batch_size: requests that run at once.
        adapters: to train alone: their config, and the checkpoint they belong to. Else all weights come by syncs.
        capture_routes: say with each completion which experts its tokens went to.

    Attributes:
        receiver: takes weights.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        stop: Sequence[str],
        batch_size: int,
        adapters: tuple[LoraConfig, Path] | None = None,
        capture_routes: bool = False,
    ):
        self.tokenizer, self.device = tokenizer, device
        self.max_new_tokens, self.stop, self.batch_size = max_new_tokens, tuple(stop), batch_size
        self.stop_ids = stop_ids(config, tokenizer)
        config = type(config).from_dict(config.to_dict())  # the trained model's has its own attention
        # transformers' sdpa leaves out soft caps and sinks, and its grouped_mm knows no float64.
        kernels = {"attn_implementation": "eager" if describe_model(config).needs_eager_attention else "sdpa"}
        if FAMILIES[config.model_type].is_moe and dtype == torch.float64:
            kernels["experts_implementation"] = "eager"
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels)
        _check_room(sum(p.numel() * p.element_size() for p in empty.parameters()), device)
        if adapters is None:
            with torch.device(device):
                self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels).eval()
            synced = persistent_tensors(self.model)
        else:
            lora, base = adapters
            self.model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype, **kernels).eval()
            add_adapters(self.model, lora)
            self.model.to(device)
            install_adapters(self.model)
            synced = ((name, tensor) for name, tensor in self.model.named_parameters() if is_adapter(name))
        self.receiver = Receiver(
            {piece: view for name, tensor in synced for piece, view in to_hf(name, tensor.detach(), config.model_type)}
        )
        routers = routers_of(numbered_layers(self.model), FAMILIES[config.model_type]) if capture_routes else {}
        self.recorder = RouteRecorder(routers) if routers else None

    def submit(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]:
        """It shares this process, so it begins when it is waited for."""
        return functools.partial(self.generate, requests)

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], between_tokens: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """Writes completions.

        Args:
            requests: what to complete.
            between_tokens: called before every token; may bring new weights, with which completions go on. Keys and
                values stay those of the weights that computed them (as in PipelineRL, arXiv:2509.19128).

        Raises:
            WeightSyncError: there are no complete weights.
        """
        # Requests of like length together, so that little is padded and a batch ends at once.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        done: dict[int, Completion] = {}
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            batch = self._batch([requests[i] for i in places], between_tokens)
            done.update(zip(places, batch, strict=True))
        return [done[i] for i in range(len(requests))]

    def close(self) -> None:
        """Nothing was started."""

    def _batch(self, requests: list[Request], between_tokens: Callable[[], None]) -> list[Completion]:
        uniforms = self._uniforms(requests)
        temperatures = torch.tensor([r.temperature for r in requests], dtype=torch.float64, device=self.device)
        longest = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.int64)
        mask = torch.zeros(len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        cache = DynamicCache(config=self.model.config)
        written: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        finish = ["length"] * len(requests)
        rows = list(range(len(requests)))  # the request of every row that still runs
        versions: list[int] = []
        routes: list[list[np.ndarray]] = [[] for _ in requests]
        for step in range(self.max_new_tokens):
            between_tokens()
            versions.append(self.receiver.complete_version())
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
            if self.recorder is not None:
                for row, experts in zip(rows, self.recorder.take(len(rows)), strict=True):
                    routes[row].append(experts if step else experts[longest - len(requests[row].prompt) :])
            chosen, scores = _sample(output.logits[:, -1], temperatures[rows], uniforms[rows, step])
            for row, token, score in zip(rows, chosen.tolist(), scores.tolist(), strict=True):
                written[row].append(token)
                logprobs[row].append(score)
                if self._is_stop(written[row]):
                    finish[row] = "stop"
            keep = [place for place, row in enumerate(rows) if finish[row] == "length"]
            if not keep:
                break
            ids, mask = chosen[keep, None], torch.cat([mask[keep], mask.new_ones(len(keep), 1)], dim=1)
            if len(keep) < len(rows):
                cache.batch_select_indices(torch.tensor(keep, device=self.device))
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

    def _uniforms(self, requests: list[Request]) -> Tensor:
        """A number in [0, 1) for every token of every request: [requests, max_new_tokens]."""
        drawn = [np.random.default_rng(request.seed).random(self.max_new_tokens) for request in requests]
        return torch.from_numpy(np.stack(drawn)).to(self.device)

    def _is_stop(self, token_ids: list[int]) -> bool:
        if token_ids[-1] in self.stop_ids:
            return True
        if not self.stop:
            return False
        text = self.tokenizer.decode(token_ids[-STOP_TEXT_TOKENS:])
        return any(stop in text for stop in self.stop)


class RouteRecorder:
    """Notes which experts the routers of a model choose.

    Args:
        routers: by layer.
    """

    def __init__(self, routers: dict[int, Any]):
        self._chosen: list[Tensor] = []
        for number in sorted(routers):
            routers[number].register_forward_hook(self._note)

    def _note(self, _: nn.Module, __: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen.append(output[2])

    def take(self, num_rows: int) -> np.ndarray:
        """Of the last forward, over `num_rows` sequences of the same length: int16 [rows, n, M, K]."""
        chosen = torch.stack(self._chosen, 1).short().cpu().numpy()
        self._chosen.clear()
        return chosen.reshape(num_rows, -1, *chosen.shape[1:])


def stop_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a completion, by the tokenizer and by the model's config."""
    of_config: Any = config.eos_token_id
    ids = {tokenizer.eos_token_id, *(of_config if isinstance(of_config, list) else [of_config])}
    return ids - {None}


def _sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities [B].

    By inversion: the first token at which the cumulated probability exceeds the uniform number. A row's outcome thus
    hangs on its own number only.

    Args:
        logits: [B, V].
        temperatures: [B], float64; where 0, the likeliest token is taken and scored at temperature 1.
        uniforms: [B], in [0, 1), float64.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_greedy = temperatures == 0
    logprobs = (logits / temperatures.where(~is_greedy, 1.0).to(logits.dtype)[:, None]).log_softmax(1)
    cumulated = logprobs.exp().cumsum(1, dtype=torch.float64)
    inverted = torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]
    chosen = torch.where(is_greedy, logprobs.argmax(1), inverted.clamp_max(logits.shape[1] - 1))
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


def _check_room(num_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > 0.9 * free:
        raise InputError(
            f"rollout.engine=transformers: a whole copy of the model takes {num_bytes / 2**30:.0f} GiB and {device} "
            f"has {free / 2**30:.0f} GiB left: use rollout.engine=vllm with devices or servers of its own"
        )
