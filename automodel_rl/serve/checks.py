"""Checks of what clients ask for, before it becomes a job: a bad request must never reach the ranks."""

import itertools
import secrets
from typing import Any

import numpy as np

from automodel_rl.config import ServeConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Sampling
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.rollout.sampled import SamplePrompt
from automodel_rl.serve.messages import Datum, RunShape
from automodel_rl.serve.requests import LARGEST, CreateModelBody, OptimizerKind, SampleBody, number_of

TARGETS = "target_tokens"

INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
}
"""The losses that are served, with the arrays that they read. (losses/token_losses.py has their formulas, and imports
torch, which the server does without.)"""

_CLIPS = ("clip_low_threshold", "clip_high_threshold")

SETTINGS: dict[str, tuple[str, ...]] = {"ppo": _CLIPS, "cispo": _CLIPS, "dro": ("beta",)}
"""The settings of these losses."""


def check_model(model: OpenedModel) -> None:
    """Raises InputError if a model is not served."""
    multimodal = model.description.multimodal
    if multimodal is not None:
        raise InputError(f"model.path: a {multimodal!r} model has encoders, and models of text alone are served")


def check_base_model(name: str | None, config: ServeConfig) -> None:
    """Raises InputError if a client asks for another base model than the service has."""
    if name != config.base_name:
        raise InputError(f"base_model={name!r}: this server has {config.base_name!r}: ask for that")


def check_optimizer(given: OptimizerKind | None) -> None:
    """Raises InputError if a client asks for another optimizer than AdamW."""
    if given is not None and given.type != "adamw":
        raise InputError(f"optimizer_config.type={given.type!r}: adamw is served")


def shape_of(body: CreateModelBody, config: ServeConfig) -> RunShape:
    """The shape of a new run.

    Raises:
        InputError: the server has no such runs.
    """
    check_base_model(body.base_model, config)
    lora = body.lora_config
    if config.model.lora is None and lora is not None and lora.rank:
        raise InputError(
            f"lora_config.rank={lora.rank}: this server trains all weights: ask for rank 0, or start it with model.lora"
        )
    check_optimizer(body.optimizer_config)
    if config.model.lora is None:
        return RunShape(0)
    largest = config.model.lora.rank
    if lora is None or not 1 <= lora.rank <= largest:
        given = "none" if lora is None else lora.rank
        raise InputError(f"lora_config.rank={given}: ranks from 1 to {largest} (model.lora.rank) are served")
    if not (lora.train_attn or lora.train_mlp):
        raise InputError("lora_config: train_attn and train_mlp are false, and the unembedding has no adapters here")
    return RunShape(lora.rank, lora.seed or 0, lora.train_attn, lora.train_mlp)


def check_numbers(message: Any) -> None:
    """Raises InputError if a forward and backward has no place in its run's order."""
    if message.seq_id < 1:
        raise InputError(f"seq_id={message.seq_id}: requests of a run are numbered from 1")


def loss_of(message: Any) -> tuple[str, dict[str, float]]:
    """The loss of a forward and backward, and its settings.

    Raises:
        InputError: it is not served, or a setting is wrong.
    """
    name = message.loss_fn
    if name not in INPUTS:
        raise InputError(f"loss_fn={name!r} is not served: use one of {', '.join(INPUTS)}{INSTEAD.get(name, '')}")
    settings = {}
    for key, value in message.settings.items():
        number = number_of(
            value.number if value.HasField("number") else None, value.text if value.HasField("text") else None
        )
        if number is None or key not in SETTINGS.get(name, ()):
            known = ", ".join(SETTINGS.get(name, ())) or "none"
            raise InputError(f"loss_fn_config.{key}: {name} has the settings {known}, numbers of at most {LARGEST:g}")
        settings[key] = number
    if name == "dro" and "beta" not in settings:
        raise InputError("loss_fn=dro needs loss_fn_config.beta, a number")
    return name, settings


INSTEAD = {
    "stable_reinforce": "; for rollouts, importance_sampling (loss_fn=importance_sampling)",
    "gspo": "; for rollouts, ppo or cispo",
}


def for_loss(data: list[Datum], loss: str) -> list[Datum]:
    """The data with only those arrays that a loss reads. Others may have any size. Weights that are not given are 1."""
    names = {TARGETS, *INPUTS[loss]}
    found = []
    for one in data:
        inputs = {name: one.inputs[name] for name in one.inputs.keys() & names}
        defaults = {"weights": np.ones(len(one), np.float32)} if "weights" in names else {}
        found.append(Datum(one.tokens, defaults | inputs))
    return found


def check_data(data: list[Datum], loss: str, config: ServeConfig, vocab_size: int) -> None:
    """Raises InputError if datums do not fit a loss, the model or the limits."""
    if not 1 <= len(data) <= config.limits.sequences:
        raise InputError(f"{len(data)} datums: a request has 1 to {config.limits.sequences} (limits.sequences)")
    for place, datum in enumerate(data):
        length = len(datum)
        if not 1 <= length < config.microbatch_tokens:
            raise InputError(
                f"datum {place} has {length} tokens: 1 to {config.microbatch_tokens - 1} fit (microbatch_tokens)"
            )
        for name in (TARGETS, *INPUTS[loss]):
            array = datum.inputs.get(name)
            if array is None:
                raise InputError(f"datum {place} has no {name}, which {loss} reads")
            if array.shape != (length,):
                raise InputError(f"datum {place} has {len(array)} {name} for {length} tokens of model_input")
            if name != TARGETS and not np.isfinite(array).all():
                raise InputError(f"datum {place} has NaN or infinity in {name}")
            if (array.dtype == np.int64) != (name == TARGETS):
                raise InputError(f"datum {place} has {name} of {array.dtype}")
        for name, ids in (("model_input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise InputError(f"datum {place} has a token outside of 0 to {vocab_size - 1} in {name}")


NOT_OF_SAMPLES = (
    *("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"),
    "prompt_logprobs_last_n",
)
"""What a sample request may ask for, and is not served."""


def prompt_of(body: SampleBody, config: ServeConfig, vocab_size: int) -> SamplePrompt:
    """The prompt of a sample request.

    Raises:
        InputError: it does not fit the model or the limits, or asks for what is not served.
    """
    for key in NOT_OF_SAMPLES:
        if getattr(body, key):
            raise InputError(f"{key} is not served: prompt_logprobs and the logprobs of samples are")
    if any(chunk.tokens is None for chunk in body.prompt.chunks):
        raise InputError("the prompt has a chunk that is not text: images are not served")
    tokens = list(itertools.chain.from_iterable(chunk.tokens or [] for chunk in body.prompt.chunks))
    params, room = body.sampling_params, config.microbatch_tokens - len(tokens)
    if not tokens or room < 1:
        raise InputError(f"the prompt has {len(tokens)} tokens: 1 to {config.microbatch_tokens - 1} fit")
    if max(tokens) >= vocab_size:
        raise InputError(f"the prompt has token {max(tokens)}: ids are 0 to {vocab_size - 1}")
    if body.num_samples > config.limits.sequences:
        raise InputError(f"num_samples={body.num_samples}: at most {config.limits.sequences} (limits.sequences)")
    if params.max_tokens is not None and params.max_tokens > room:
        raise InputError(
            f"max_tokens={params.max_tokens} after {len(tokens)} tokens of the prompt: prompt and sample have at most "
            f"{config.microbatch_tokens} (microbatch_tokens)"
        )
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    texts = tuple(one for one in stop or [] if isinstance(one, str))
    ids = tuple(one for one in stop or [] if isinstance(one, int))
    if max(ids, default=0) >= vocab_size:
        raise InputError(f"sampling_params.stop has token {max(ids)}: ids are 0 to {vocab_size - 1}")
    sampling = Sampling(
        params.max_tokens or room,
        params.temperature,
        params.top_p,
        max(params.top_k, 0),
        texts,
        None if stop is None or texts else ids,
    )
    seed = secrets.randbelow(2**63) if params.seed is None else params.seed
    return SamplePrompt(tokens, body.num_samples, seed, sampling, bool(body.prompt_logprobs))
