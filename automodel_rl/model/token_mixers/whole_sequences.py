"""What all token mixers need: whole sequences on a rank, a short convolution within each, and fast kernels.

Context parallelism shares heads (or channels) instead of tokens in these layers: ranks exchange their tokens of all
heads for all tokens of some heads, compute, and exchange the results back.

Shape letters: t tokens of this rank, T tokens of the microbatch.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.errors import InputError
from automodel_rl.parallel.collectives import AllGatherCP, from_heads, to_heads
from automodel_rl.parallel.tensor_parallel import Sections, own_rows

WRONG_TRITON = (Version("3.4.0"), Version("3.7.1"))
"""Versions of Triton that compile fla's kernels to wrong gradients: from the first up to the second, which is right
(flash-linear-attention, issue 640)."""


def fast_kernels_obstacle(title: str, device: torch.device) -> str | None:
    """Why a mixer does not compute with the kernels of flash-linear-attention, with the remedy; None if it can.

    Args:
        title: the mixer's name in messages.
        device: the device of the computation.
    """
    if device.type != "cuda":
        return f"{title} has kernels on CUDA alone: use a GPU"
    if importlib.util.find_spec("fla") is None:
        return (
            f"{title} needs the package fla-core on CUDA, which is not installed: "
            "pip install 'automodel-rl[fla]', or set model.dtype=float32"
        )
    triton = Version(importlib.metadata.version("triton"))
    if WRONG_TRITON[0] <= triton < WRONG_TRITON[1]:
        return (
            f"{title} would get wrong gradients from Triton {triton}: install torch 2.13 (Triton 3.7.1), or set "
            "model.dtype=float32"
        )
    return None


def needs_fast_kernels(title: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a mixer that is too slow without kernels computes with those of flash-linear-attention.

    Args:
        title: the mixer's name in messages.
        device, dtype: device and dtype of the computation.

    Raises:
        InputError: it should, and cannot.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    if (obstacle := fast_kernels_obstacle(title, device)) is not None:
        raise InputError(f"model.path: {obstacle}")
    return True


def own_channels(weight: Tensor, sections: Sections, groups: tuple[dist.ProcessGroup | None, ...]) -> Tensor:
    """The rows of this rank's channels.

    Args:
        weight: those of all channels, [C, ...].
        sections: what the rows are.
        groups: groups that cut channels, one after the other; None for one that is not there.
    """
    for group in groups:
        if group is not None:
            weight, sections = own_rows(weight, sections, group), sections.of_rank(group.size())
    return weight


def over_whole_sequences(
    compute: Callable[..., Tensor],
    by_heads: tuple[Tensor, ...],
    microbatch: LocalMicrobatch,
    cp_group: dist.ProcessGroup | None,
    of_all_heads: tuple[Tensor, ...] = (),
) -> Tensor:
    """Computes something that needs all tokens of each sequence, in order.

    Args:
        compute: gets the tensors with all tokens, first those of some heads, and gives [T, h, V].
        by_heads: tensors of this rank's tokens, each [t, heads, ...], whose heads ranks share.
        microbatch: this rank's tokens.
        cp_group: the ranks that share a microbatch.
        of_all_heads: tensors [t, ...] that every rank needs whole.

    Returns:
        The result for this rank's tokens and all heads, [t, heads, V].
    """
    parts = (*by_heads, *of_all_heads)
    if cp_group is not None:
        whole = tuple(AllGatherCP.apply(part, cp_group, "sum") for part in of_all_heads)
        parts = (*to_heads(by_heads, cp_group), *whole)
    if microbatch.restore is not None:  # pads are left out, and so is the order of ranks
        parts = tuple(part.index_select(0, microbatch.restore) for part in parts)
    mixed = compute(*parts)
    if microbatch.restore is not None:
        size = 1 if cp_group is None else cp_group.size()
        whole_row = mixed.new_zeros(microbatch.num_tokens * size, *mixed.shape[1:])
        mixed = whole_row.index_copy(0, microbatch.restore, mixed)
    return mixed if cp_group is None else from_heads(mixed, cp_group)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """The causal convolution of every sequence, [T, C].

    Args:
        inputs: [T, C].
        weight: the taps of every channel, [C, W]; the last one is that of the token itself.
        bias: what is added to every channel, [C].
        offsets: the place of each token in its sequence, int64 [T].
    """
    total = inputs * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(inputs, (0, 0, back, 0))[: len(inputs)] * (offsets >= back)[:, None]
        total = total + earlier * weight[:, -1 - back]
    return total if bias is None else total + bias


def convolve_heads(
    parts: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, offsets: Tensor
) -> tuple[Tensor, ...]:
    """SiLU of the convolution of several tensors, whose channels stand one after the other.

    Args:
        parts: each [T, heads, d].
        weight, bias, offsets: as of `convolve`, for the channels of all.
    """
    joined = F.silu(convolve(torch.cat([part.flatten(1) for part in parts], dim=-1), weight, bias, offsets))
    pieces = joined.split([part[0].numel() for part in parts], dim=-1)
    return tuple(piece.unflatten(1, part.shape[1:]) for piece, part in zip(pieces, parts, strict=True))
