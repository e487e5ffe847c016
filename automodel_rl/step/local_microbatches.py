"""This rank's tokens of a step's microbatches, on its device. They are cut over cp and tp, and have the routes of this
rank's layers and the embeddings of media."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from automodel_rl.batch import LEAST_TOKENS, LocalMicrobatch, Microbatch, local_microbatch, multimodal_positions
from automodel_rl.batch.tensors import LOGPROB_GRADIENT, ROTARY_POSITIONS
from automodel_rl.families.known import multimodal_family
from automodel_rl.model.float8 import MULTIPLE
from automodel_rl.model.handle import ModelHandle


def local_microbatches(
    microbatches: Sequence[Microbatch],
    embeddings: Sequence[Callable[[], Tensor]],
    handle: ModelHandle,
    logprob_gradient: Callable[[Microbatch, int], Tensor | None] | None = None,
) -> list[LocalMicrobatch]:
    """This rank's part of every microbatch.

    Args:
        microbatches: this data rank's microbatches.
        embeddings: give the embeddings of the media of every microbatch; empty on ranks that do not use them.
        handle: the model. This rank's layers decide which routes are needed.
        logprob_gradient: gives the derivative of the loss by the log-probabilities of a microbatch and its place in
            the step, float64 [T]; None if it is not known before the forward.
    """
    layout = handle.layout
    sequence_parallel = layout.parallel.sequence_parallel
    multiple = LEAST_TOKENS * layout.parallel.tp if sequence_parallel else 1
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
        part = local_microbatch(microbatch, layout.parallel.cp, layout.cp_rank, multiple, tokens)
        if embeddings:
            part = dataclasses.replace(part, media=dataclasses.replace(part.media, embeddings=embeddings[number]))
        if sequence_parallel:
            part = part.between_blocks(layout.parallel.tp, layout.tp_rank)
        parts.append(dataclasses.replace(part, index=number).to(layout.device))
    return parts
