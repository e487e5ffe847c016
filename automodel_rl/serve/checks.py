"""Checks of client requests before they become jobs: an invalid request must never reach the ranks."""

import itertools
import secrets
from typing import Any

import numpy as np

from automodel_rl.config import ServeConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Sampling
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.rollout.sampled import PromptScoring, SamplePrompt
from automodel_rl.serve.arrays import array_of
from automodel_rl.serve.messages import TARGETS, Datum, RunShape
from automodel_rl.serve.requests import LARGEST, CreateModelBody, OptimizerKind, SampleBody, number_of

INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
}
"""Supported losses and the arrays they read. Their formulas are in losses/token_losses.py, which is not imported
because the server runs without torch."""

_CLIPS = ("clip_low_threshold", "clip_high_threshold")

SETTINGS: dict[str, tuple[str, ...]] = {"ppo": _CLIPS, "cispo": _CLIPS, "dro": ("beta",)}
"""Settings of the losses."""


def check_model(model: OpenedModel) -> None:
    multimodal = model.description.multimodal
    if multimodal is not None:
        raise InputError(f"model.path: a {multimodal!r} model has encoders: only text models are supported")
    lora = model.model.lora
    if lora is not None and (lora.dora or lora.modules_to_save):
        raise InputError(
            f"model.path: its adapters use DoRA (use_dora={lora.dora}) or have other modules "
            f"(modules_to_save={[*lora.modules_to_save]}), which are not supported: merge them with automodel-rl export"
        )


def check_base_model(name: str | None, config: ServeConfig) -> None:
    """Raises InputError if a client requests another base model than the one that is trained and sampled from."""
    if name in config.teachers:
        raise InputError(
            f"base_model={name!r} only scores prompts here: request {config.base_name!r}, which is trained"
        )
    if name != config.base_name:
        others = f", and {', '.join(map(repr, config.teachers))} to score prompts" if config.teachers else ""
        raise InputError(f"base_model={name!r}: this server has {config.base_name!r}{others}: request that")


def check_optimizer(given: OptimizerKind | None) -> None:
    if given is not None and given.type != "adamw":
        raise InputError(f"optimizer_config.type={given.type!r}: only adamw is supported")


def shape_of(body: CreateModelBody, config: ServeConfig) -> RunShape:
    """Returns the shape of a new run. Raises InputError if the server does not support it."""
    check_base_model(body.base_model, config)
    lora = body.lora_config
    if config.model.lora is None and lora is not None and lora.rank:
        raise InputError(
            f"lora_config.rank={lora.rank}: this server trains all weights: request rank 0, or start it with model.lora"
        )
    check_optimizer(body.optimizer_config)
    if config.model.lora is None:
        return RunShape(0)
    largest = config.model.lora.rank
    if lora is None or not 1 <= lora.rank <= largest:
        given = "none" if lora is None else lora.rank
        raise InputError(f"lora_config.rank={given}: must be from 1 to {largest} (model.lora.rank)")
    if not (lora.train_attn or lora.train_mlp):
        raise InputError("lora_config: train_attn and train_mlp are false, and the unembedding has no adapters here")
    return RunShape(lora.rank, lora.seed or 0, lora.train_attn, lora.train_mlp)


def check_numbers(message: Any) -> None:
    """Raises InputError if a forward-backward request has no valid `seq_id`."""
    if message.seq_id < 1:
        raise InputError(f"seq_id={message.seq_id}: requests of a run are numbered from 1")


def loss_of(message: Any) -> tuple[str, dict[str, float]]:
    """Returns the loss of a forward-backward request and its settings. Raises InputError if they are not supported."""
    name = message.loss_fn
    if name not in INPUTS:
        raise InputError(f"loss_fn={name!r} is not supported: use one of {', '.join(INPUTS)}{INSTEAD.get(name, '')}")
    settings = {}
    for key, value in message.settings.items():
        number = number_of(
            value.number if value.HasField("number") else None, value.text if value.HasField("text") else None
        )
        if number is None or key not in SETTINGS.get(name, ()):
            known = ", ".join(SETTINGS.get(name, ())) or "none"
            raise InputError(
                f"loss_fn_config.{key}: {name} supports the settings {known}, numbers of at most {LARGEST:g}"
            )
        settings[key] = number
    if name == "dro" and "beta" not in settings:
        raise InputError("loss_fn=dro needs loss_fn_config.beta, a number")
    return name, settings


INSTEAD = {
    "stable_reinforce": "; for rollouts, importance_sampling (loss_fn=importance_sampling)",
    "gspo": "; for rollouts, ppo or cispo",
}


def for_loss(data: list[Datum], loss: str) -> list[Datum]:
    """Keeps only the arrays that a loss reads, as others may have any size. Missing weights are 1."""
    names = {TARGETS, *INPUTS[loss]}
    found = []
    for one in data:
        inputs = {name: one.inputs[name] for name in one.inputs.keys() & names}
        of_targets = one.inputs[TARGETS].shape if TARGETS in one.inputs else ()
        defaults = {"weights": np.ones(of_targets, np.float32)} if "weights" in names else {}
        found.append(Datum(one.tokens, defaults | inputs))
    return found


def check_data(data: list[Datum], loss: str, config: ServeConfig, vocab_size: int) -> None:
    if not 1 <= len(data) <= config.limits.sequences:
        raise InputError(f"{len(data)} datums: a request has 1 to {config.limits.sequences} (limits.sequences)")
    _check_width(data, config)
    for place, datum in enumerate(data):
        length = len(datum)
        if not 1 <= length < config.microbatch_tokens:
            raise InputError(
                f"datum {place} has {length} tokens: 1 to {config.microbatch_tokens - 1} fit (microbatch_tokens)"
            )
        for name in (TARGETS, *INPUTS[loss]):
            array = datum.inputs.get(name)
            if array is None:
                raise InputError(f"datum {place} has no {name}, which {loss} needs")
            _check_shape(array, datum, name, loss, f"datum {place} has")
            if name != TARGETS and not np.isfinite(array).all():
                raise InputError(f"datum {place} has NaN or infinity in {name}")
            if (array.dtype == np.int64) != (name == TARGETS):
                raise InputError(f"datum {place} has {name} of dtype {array.dtype}")
        for name, ids in (("model_input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise InputError(f"datum {place} has a token outside 0 to {vocab_size - 1} in {name}")


def _check_shape(array: np.ndarray, datum: Datum, name: str, loss: str, begins: str) -> None:
    """Raises InputError unless an array has one value per token or, for cross entropy, several."""
    length, shape = len(datum), array.shape
    if not shape or shape[0] != length:
        raise InputError(f"{begins} {array.size} {name} for {length} tokens of model_input")
    if len(shape) == 1 and name == TARGETS:
        return
    if len(shape) == 2 and loss != "cross_entropy":
        raise InputError(f"{begins} {name} of shape {list(shape)}: {loss} has one value for each token")
    if len(shape) == 2 and not shape[1]:
        raise InputError(f"{begins} {name} of shape {list(shape)}: pass at least one target for each token")
    if shape != datum.inputs[TARGETS].shape:
        raise InputError(
            f"{begins} {name} of shape {list(shape)} for {TARGETS} of shape {list(datum.inputs[TARGETS].shape)}: pass "
            "the same shape for both"
        )


def _check_width(data: list[Datum], config: ServeConfig) -> None:
    """Raises InputError if there are more targets than a body can hold, counting all datums as wide as the widest."""
    width, most = max(datum.width for datum in data), config.max_bytes // BYTES_OF_TARGET
    total = sum(map(len, data)) * width
    if total > most:
        raise InputError(
            f"{sum(map(len, data))} tokens with up to {width} targets each are {total:,} targets: at most {most:,} fit "
            "(limits.body_mib); send fewer datums at once"
        )


BYTES_OF_TARGET = 12
"""Bytes of a target and its weight in a message."""


def prompt_of(body: SampleBody, config: ServeConfig, vocab_size: int) -> SamplePrompt:
    """Returns the prompt of a sample request. Raises InputError if it exceeds the model or the limits, or uses an
    unsupported option."""
    if body.prompt_alt_tokens_k:
        raise InputError("prompt_alt_tokens_k is not supported: use topk_prompt_logprobs or target_prompt_logprobs")
    if any(chunk.tokens is None for chunk in body.prompt.chunks):
        raise InputError("the prompt has a chunk that is not text: images are not supported")
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
            f"max_tokens={params.max_tokens} with a prompt of {len(tokens)} tokens: prompt and sample have at most "
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
    scoring = _scoring_of(body, len(tokens), room, config.max_bytes, vocab_size)
    return SamplePrompt(tokens, body.num_samples, seed, sampling, scoring, body.topk_sample_logprobs or 0)


def bytes_of_prompt(prompt: SamplePrompt) -> int:
    """Upper bound on the memory of a prompt and its answer: tokens as Python numbers, and arrays."""
    ids, scoring = prompt.scoring.ids, prompt.scoring
    written = prompt.num_samples * prompt.sampling.max_tokens
    places = len(prompt.tokens) * (1 + scoring.num_top) + prompt.num_top * (
        prompt.num_samples * len(prompt.tokens) + written
    )
    return 8 * (places + written) + (0 if ids is None else 2 * ids.nbytes)


def check_scored(prompt: SamplePrompt, teacher: str) -> None:
    """Raises InputError unless a request to a teacher only scores a prompt."""
    if prompt.sampling.max_tokens != 1 or prompt.num_top:
        raise InputError(
            f"{teacher!r} only scores prompts here: request max_tokens=1 without topk_sample_logprobs; the token is "
            "the top one"
        )


def _scoring_of(body: SampleBody, length: int, room: int, max_bytes: int, vocab_size: int) -> PromptScoring:
    """Returns the requested scores of a prompt. Raises InputError if they cannot be computed."""
    last, k, named = body.prompt_logprobs_last_n, body.topk_prompt_logprobs or 0, body.target_prompt_logprobs
    if last is not None and not (body.prompt_logprobs and 1 <= last < length):
        raise InputError(
            f"prompt_logprobs_last_n={last} for a prompt of {length} tokens: set 1 to {length - 1}, with "
            "prompt_logprobs"
        )
    written = body.num_samples * (length + (body.sampling_params.max_tokens or room))
    of_samples = body.topk_sample_logprobs or 0
    for key, width, places in (("topk_prompt_logprobs", k, length), ("topk_sample_logprobs", of_samples, written)):
        if 8 * width * places > max_bytes:
            raise InputError(f"{key}={width} for up to {places} tokens: the answer is limited to limits.body_mib")
    first = 1 if last is None else length - last
    if named is None:
        return PromptScoring(bool(body.prompt_logprobs), k, None, first)
    if named.shape[0] != length - 1 or not named.shape[1]:
        raise InputError(
            f"target_prompt_logprobs has the shape {[*named.shape]} for a prompt of {length} tokens: pass "
            f"[{length - 1}, K], one row for each token but the first"
        )
    values = np.array(named.data, np.int64)
    ids = array_of(values, named.shape, named.positions, -1, max_bytes, "target_prompt_logprobs")
    if ids.size and ids.max() >= vocab_size:
        raise InputError(f"target_prompt_logprobs has token {ids.max()}: ids are 0 to {vocab_size - 1}, -1 for none")
    return PromptScoring(bool(body.prompt_logprobs), k, ids, first)
