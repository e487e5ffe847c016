"""What the attention backends of `model/attention.py` can compute, and on what."""

from dataclasses import dataclass
from typing import Literal

Attention = Literal["auto", "varlen", "te", "sdpa", "eager"]


@dataclass(frozen=True)
class AttentionLimits:
    """Of one backend.

    Attributes:
        needs_cuda: it runs on CUDA in bfloat16 only.
        has_mathematics: it computes soft caps and sinks.
        has_windows_over_cp: it computes sliding windows of fewer queries than keys, as context parallelism has them.
    """

    needs_cuda: bool = False
    has_mathematics: bool = False
    has_windows_over_cp: bool = True


ATTENTION: dict[Attention, AttentionLimits] = {
    "sdpa": AttentionLimits(),
    "eager": AttentionLimits(has_mathematics=True),
    "varlen": AttentionLimits(needs_cuda=True),
    # Measured with TransformerEngine 2.19 on cuDNN 9.14: no kernel for windows of fewer queries than keys.
    "te": AttentionLimits(needs_cuda=True, has_windows_over_cp=False),
}
"""By name; `auto` chooses among them."""
