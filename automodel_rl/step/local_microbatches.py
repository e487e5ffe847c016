"""This rank's share of a step's microbatches, on its device: tokens cut over cp and tp, routes of this rank's layers,
and media embeddings."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from automodel_rl.batch import MIN_TOKENS, LocalMicrobatch, Microbatch, local_microbatch, multimodal_positions
from automodel_rl.batch.tensors import LOGPROB_GRADIENT, MTP_TARGETS, READ_IDS, ROTARY_POSITIONS
from automodel_rl.families.known import multimodal_family
from automodel_rl.losses import Readout
from automodel_rl.model.float8 import MULTIPLE
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.mtp import mtp_targets


def local_microbatches(
    microbatches: Sequence[Microbatch],
    embeddings: Sequence[Callable[[], Tensor]],
    handle: ModelHandle,
    logprob_gradient: Callable[[Microbatch, int], Tensor | None] | None = None,
    readout: Readout | None = None,
) -> list[LocalMicrobatch]:
    """Returns this rank's part of every microbatch.

    Args:
        embeddings: return the media embeddings of each microbatch; empty on ranks that do not use them.
        handle: the model, whose layers on this rank determine the routes needed.
        logprob_gradient: returns the derivative of the loss by a microbatch's log-probabilities, float64 [T] or
            [T, K], given its index in the step; None if it is not known before the forward.
        readout: the per-token values to read; None if log-probabilities of targets, or less, suffice.

    Raises:
        ValueError: `readout.ids` names no values, or none that are token ids.
    """
    layout = handle.layout
    sequence_parallel = layout.parallel.sequence_parallel
    multiple = MIN_TOKENS * layout.parallel.tp if sequence_parallel else 1
    if handle.model.fp8 is not None:
        multiple = math.lcm(multiple, MULTIPLE)
    family = multimodal_family(handle.whole_config)
    rotary = None if family is None else family.rotary_grid(handle.whole_config)
    parts = []
    for number, microbatch in enumerate(microbatches):
        tokens: dict[str, Tensor] = {}
        if rotary is not None:
            tokens[ROTARY_POSITIONS] = multimodal_positions(microbatch.media, microbatch.lengths, rotary).T
        if microbatch.routes is not None:
            microbatch = dataclasses.replace(microbatch, routes=microbatch.routes.select(handle.router_layers))
        gradient = None if logprob_gradient is None else logprob_gradient(microbatch, number)
        if gradient is not None:
            tokens[LOGPROB_GRADIENT] = gradient
        if readout is not None and readout.ids is not None:
            tokens[READ_IDS] = _ids(microbatch, readout.ids, handle.config.vocab_size)
        if readout is not None and readout.mtp:
            tokens[MTP_TARGETS] = mtp_targets(microbatch)
        exchanges_heads = layout.parallel.cp_exchange == "all_to_all"
        part = local_microbatch(microbatch, layout.parallel.cp, layout.cp_rank, multiple, tokens, exchanges_heads)
        if embeddings:
            part = dataclasses.replace(part, media=dataclasses.replace(part.media, embeddings=embeddings[number]))
        if sequence_parallel:
            part = part.between_blocks(layout.parallel.tp, layout.tp_rank)
        parts.append(dataclasses.replace(part, index=number).to(layout.device))
    return parts


def _ids(microbatch: Microbatch, name: str, vocab_size: int) -> Tensor:
    """Returns token ids [T, K] from a microbatch's values."""
    found = microbatch.values.get(name)
    if found is None:
        raise ValueError(f"Readout.ids={name}: the microbatch has values {sorted(microbatch.values)}")
    if found.dtype != torch.int64 or found.ndim != 2:
        raise ValueError(f"{name} is of {found.dtype} with shape {list(found.shape)}: token ids must be int64 [T, K]")
    if found.numel() and int(found.max()) >= vocab_size:  # otherwise scored as a token with logit 0
        raise ValueError(
            f"{name} has the token id {int(found.max())}, but those of the model are 0 to {vocab_size - 1}; -1 means "
            "none"
        )
    return found
