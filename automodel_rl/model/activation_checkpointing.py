"""Activation checkpointing: layers recompute activations in the backward."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.attention import varlen  # noqa: F401 (registers its operator)
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from automodel_rl.config.model import Recomputed
from automodel_rl.model import flash_sinks  # noqa: F401 (likewise)
from automodel_rl.quantized import linear, stack  # noqa: F401 (likewise)

OF_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
    "flash_attn_3::_flash_attn_forward",
    "automodel_rl::flash_sinks",
)
"""Attention operators: small results, cost quadratic in sequence length."""

KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    *OF_ATTENTION,
    "automodel_rl::quantized_product",
    "automodel_rl::quantized_grouped_product",
)
"""Operators whose results selective checkpointing keeps: matrix products and attention, which dominate the cost."""

ANNOTATIONS = ("profiler::_record_function_enter_new", "profiler::_record_function_exit")
"""Operators that mark ranges in a profile. FSDP units inside a layer call more of them in recomputation than in the
forward, which torch rejects for operators that are not ignored."""

_keeps_nothing: ContextVar[bool] = ContextVar("keeps_nothing", default=False)

OPTIONAL = ("flash_attn_3",)
"""Libraries whose operators exist only after their import."""


def checkpoint_layers(layers: Iterable[Any], mode: Recomputed, in_graph: bool = False) -> None:
    """Makes layers recompute in the backward, by replacing their forwards.

    Args:
        mode: "selective" keeps the results of `KEPT`; "full" and "offload" nothing.
        in_graph: the layers are compiled afterwards, with the recomputation in their graphs. Results of attention are
            then always kept. If a graph recomputed everything, torch 2.11 would keep results of autograd functions,
            such as the gathered keys of all ranks, and torch 2.13 would not compile split layers. Layers whose graph
            breaks recompute outside of graphs.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective" or in_graph:
        kept = frozenset(_operators(KEPT if mode == "selective" else OF_ATTENTION))
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, functools.partial(_policy, kept)
        )
        SAC_IGNORED_OPS.update(_operators(ANNOTATIONS))
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Makes selective checkpointing keep nothing computed in the block, such as products needed only for a choice."""
    token = _keeps_nothing.set(True)
    try:
        yield
    finally:
        _keeps_nothing.reset(token)


def _policy(kept: frozenset[Any], _: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    keeps = operator in kept and not _keeps_nothing.get()
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _operators(names: Iterable[str]) -> list[Any]:
    found = []
    for name in names:
        namespace, operator = name.split("::")
        with contextlib.suppress(*([AttributeError] if namespace in OPTIONAL else [])):
            packet = getattr(getattr(torch.ops, namespace), operator)
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found
