"""Additional per-token model inputs of microbatches, and copies to a device.

These inputs are in `tokens` of a microbatch, by name. A new one needs a name here, code that puts it into
`Microbatch.tokens` or passes it to `local_microbatches`, and code that reads it from `LocalMicrobatch.tokens`. Context
parallelism splits all of them alike, and pads have 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

ROTARY_POSITIONS = "rotary_positions"
"""Positions in time, height and width, int64 [t, 3], for models with M-RoPE."""

LOGPROB_GRADIENT = "logprob_gradient"
"""Derivative of the loss with respect to the log-probability of every target, float64 [t], or of every token of
`READ_IDS`, float64 [t, K], if known before the forward."""

READ_IDS = "read_ids"
"""Token ids whose log-probabilities are computed besides the target's, int64 [t, K]; -1 for none."""

MTP_TARGETS = "mtp_targets"
"""Token after the next in the same sequence, int64 [t]; negative for none. Its presence makes the MTP layer run
(model/mtp.py)."""

ADAPTER_GATE = "adapter_gate"
"""Factors of adapter ranks, [t, rank], for several trainings in one pass. Each training owns a disjoint set of rows of
every `lora_A` and the same columns of every `lora_B`. A token's factors are the scale of its own training on these, and
0 elsewhere, so that it uses, and gives gradients to, only its own training's adapters."""


def taken(inputs: Mapping[str, Tensor], places: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    """Gathers tokens from inputs [T, ...] at `places`, int64 [t], with 0 where `is_real`, bool [t], is False."""
    return {name: rows[places] * is_real.view(-1, *[1] * (rows.ndim - 1)) for name, rows in inputs.items()}


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to `device`. Copies from the host to CUDA go through pinned memory and do not block the host."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
