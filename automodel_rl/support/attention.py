"""Limits of the attention backends of `model/attention.py`: what each can compute, and on what."""

from dataclasses import dataclass

from automodel_rl.config.model import Attention


@dataclass(frozen=True)
class AttentionLimits:
    """Limits of one backend.

    Attributes:
        needs_cuda: whether it runs only on CUDA and in bfloat16.
        is_traceable: whether compiled layers hold it in their graph. The others go over sequences on the host, or are
            modules of a library that do not compile; compiled layers call them between two graphs.
        has_softcap: whether it computes a soft cap of scores.
        has_sinks: whether it computes sinks.
        has_windows_over_cp: whether it computes sliding windows with fewer queries than keys, which context parallelism
            needs.
        has_bidirectional_images: whether it computes attention that is not causal, for images whose tokens see each
            other both ways.
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
"""Limits by name; `auto` chooses among them."""

FASTEST_FIRST: tuple[Attention, ...] = ("fa3", "te", "varlen")
"""The backends for CUDA by their speed on an H200: benchmarks/README.md."""
