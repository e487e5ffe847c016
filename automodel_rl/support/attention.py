"""Limits of the attention backends in `model/attention.py`."""

from dataclasses import dataclass

from automodel_rl.config.model import Attention


@dataclass(frozen=True)
class AttentionLimits:
    """Limits of one backend.

    Attributes:
        needs_cuda: whether it requires CUDA and bfloat16.
        is_traceable: whether it can be part of a compiled layer's graph. Other backends loop over sequences on the
            host, or are library modules that do not compile, and are called between two graphs.
        has_softcap: whether it supports a soft cap of scores.
        has_sinks: whether it supports sinks.
        has_windows_over_cp: whether it supports sliding windows with fewer queries than keys, as context parallelism
            needs.
        has_bidirectional_images: whether it supports non-causal attention, for images whose tokens attend to each other
            in both directions.
    """

    needs_cuda: bool = False
    is_traceable: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    has_windows_over_cp: bool = True
    has_bidirectional_images: bool = True


ATTENTION: dict[Attention, AttentionLimits] = {
    "sdpa": AttentionLimits(),
    "eager": AttentionLimits(has_softcap=True, has_sinks=True),
    "varlen": AttentionLimits(needs_cuda=True, is_traceable=True, has_sinks=True),
    "fa3": AttentionLimits(needs_cuda=True, is_traceable=True, has_sinks=True),
    # Measured with TransformerEngine 2.19 on cuDNN 9.14: no kernel for windows with fewer queries than keys.
    "te": AttentionLimits(needs_cuda=True, has_windows_over_cp=False, has_bidirectional_images=False),
}
"""Limits by backend; `auto` chooses among them."""

FASTEST_FIRST: tuple[Attention, ...] = ("fa3", "te", "varlen")
"""CUDA backends by speed on an H200, see benchmarks/speed.md."""
