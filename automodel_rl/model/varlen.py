"""Attention of encoders in one call for images or chunks of different sizes, without masks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from automodel_rl.compat.modules import set_attention

VARLEN = "automodel_rl_flash_varlen"
"""Name under which transformers knows `varlen_attention`. As it contains "flash", encoders pass images of different
sizes in one call, not one by one."""


def choose_varlen(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Makes an encoder whose layers get bounds of segments compute attention in one call, in bfloat16 on CUDA.

    Args:
        config: the config that the encoder's layers share.
        device, dtype: where and in which type it computes.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        AttentionInterface.register(VARLEN, varlen_attention)
        # Set only now: while the model is built, transformers takes the name for that of a kernel on the hub.
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
    """torch's varlen_attn with full attention in each segment, in transformers' signature. CUDA and 16-bit types.

    Args:
        query, key, value: [1, heads, n, D].
        cu_seq_lens_q: the starts of the segments, and n at the end, int32.
        max_length_q: length of the longest segment.

    Returns:
        [1, n, heads, D], and no attention weights.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=(-1, -1)
    )
    assert isinstance(output, Tensor)  # a tuple only when auxiliary outputs are asked for
    return output[None], None
