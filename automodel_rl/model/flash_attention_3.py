"""FlashAttention-3 for Hopper GPUs, from the optional package `flash_attn_interface`."""

import importlib.util
from typing import Any

import torch

HOPPER = (9, 0)


def obstacle(head_dim: int, value_dim: int, device: torch.device) -> str | None:
    """Returns why it cannot run here, None if nothing is known. Head dims that a build has no kernels for are not
    detected."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "needs the package flash_attn_interface, which is not installed"
    if torch.cuda.get_device_capability(device) != HOPPER:
        return f"needs a Hopper GPU, but this is a {torch.cuda.get_device_name(device)}"
    if head_dim != value_dim:
        return f"computes heads whose queries and values have the same dims, but these have {head_dim} and {value_dim}"
    return None


def attention(*args: Any, **kwargs: Any) -> Any:
    """`flash_attn_interface.flash_attn_varlen_func`: query [q, heads, D], key and value [k, KV heads, D], cumulative
    and longest lengths of segments -> [q, heads, D]."""
    from flash_attn_interface import flash_attn_varlen_func  # an optional dependency

    return flash_attn_varlen_func(*args, **kwargs)
