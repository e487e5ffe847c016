"""Attention over packed rows: every sequence sees itself, causally, and nothing else.

The functions are registered with transformers' AttentionInterface and reach the layers of transformers' and of
nemo_automodel's models alike. The row comes along as the keyword `batch` of every layer.
"""

import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from automodel_rl.batch import PackedBatch
from automodel_rl.errors import InputError

SDPA, VARLEN = "automodel_rl_sdpa", "automodel_rl_varlen"

# Before torch 2.12 varlen_attn takes fewer KV heads than query heads without being told.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def register_attention() -> None:
    """Makes both functions known to transformers, under the names `SDPA` and `VARLEN`."""
    AttentionInterface.register(SDPA, sdpa_attention)
    AttentionInterface.register(VARLEN, varlen_attention)


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """The registered name for a config's `attention`."""
    if requested == "varlen" and device.type != "cuda":
        raise InputError("model.attention=varlen needs CUDA, and this rank has none: use model.attention=auto")
    if requested == "auto":
        requested = "varlen" if device.type == "cuda" and dtype == torch.bfloat16 else "sdpa"
    return {"varlen": VARLEN, "sdpa": SDPA}[requested]


def sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    batch: PackedBatch,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention, one call for each sequence. Any device and dtype.

    Args:
        query: [1, query heads, T, head dim].
        key, value: [1, KV heads, T, head dim].

    Returns:
        [1, T, query heads, head dim], and no attention weights.
    """
    outputs = []
    bounds = [0, *itertools.accumulate(batch.lengths)]
    for start, end in itertools.pairwise(bounds):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    batch: PackedBatch,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's varlen_attn (FlashAttention), one call for the row. CUDA and 16-bit types. Shapes as `sdpa_attention`."""
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head dim]
    bounds, longest = batch.cu_seqlens, batch.max_seqlen
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), **_GQA)
    assert isinstance(output, Tensor)  # a tuple only when auxiliary outputs are asked for
    return output.unsqueeze(0), None
