"""Encoder attention in one call over images or audio chunks of different sizes, without masks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from automodel_rl.compat.modules import set_attention

VARLEN = "automodel_rl_flash_varlen"
"""Name of `varlen_attention` in transformers' registry. Because it contains "flash", encoders pass images of
different sizes in one call."""


def choose_varlen(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Selects `varlen_attention` for encoder layers that receive segment bounds, in bfloat16 on CUDA only."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        AttentionInterface.register(VARLEN, varlen_attention)
        # Not set earlier: while the model is being built, transformers would look for a hub kernel of this name.
        set_attention(config, VARLEN)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's varlen_attn with full attention within segments, in transformers' signature. CUDA and 16-bit types.

    Args:
        query, key, value: [1, heads, n, D].
        cu_seq_lens_q: start of each segment, followed by n; int32.

    Returns:
        [1, n, heads, D], and None for the attention weights.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, -1)
    )
    assert isinstance(output, Tensor)  # a tuple only if auxiliary outputs are requested
    return output[None], None
