"""Tensors of microbatches: inputs that a model may have for each token besides its id, and copies to a device.

These inputs are `tokens` of a microbatch, by name. A further one is a name here, the place that puts it into
`Microbatch.tokens` or gives it to `local_microbatches`, and the place that reads it from `LocalMicrobatch.tokens`.
Context parallelism cuts all of them alike, and pads have 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

ROTARY_POSITIONS = "rotary_positions"
"""Positions in time, height and width, int64 [t, 3], for a model with M-RoPE."""

LOGPROB_GRADIENT = "logprob_gradient"
"""The derivative of the loss by the log-probability of every target, float64 [t], or of every token of `READ_IDS`,
float64 [t, K], if it is known before the forward."""

READ_IDS = "read_ids"
"""Token ids whose log-probabilities are read besides that of the target, int64 [t, K]; -1 for none."""

MTP_TARGETS = "mtp_targets"
"""The token after the next of the same sequence, int64 [t]; negative for none. Microbatches that have it run the layer
for multi-token prediction (model/mtp.py)."""

ADAPTER_GATE = "adapter_gate"
"""Factors of the rows of low-rank adapters, [t, rank], where several trainings share a pass. Each training has some of
the rows of every `lora_A` and the same columns of every `lora_B`, and no two have one in common. A token's factors are
the scale of its own training, and 0 for those of the others. So it gets the output of its own training's adapters, and
gives gradients to these alone."""


def taken(inputs: Mapping[str, Tensor], places: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    """The rows of tokens at some places, and 0 for those that are not real.

    Args:
        inputs: tensors [T, ...] by name.
        places: int64 [t].
        is_real: bool [t].
    """
    return {name: rows[places] * is_real.view(-1, *[1] * (rows.ndim - 1)) for name, rows in inputs.items()}


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to `device`. A copy from the host to CUDA goes through pinned memory, so the host does not
    wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
