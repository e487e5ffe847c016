"""Shared parts of token mixers: whole sequences on each rank, short convolutions within them, and fast kernels.

Under context parallelism, ranks exchange their tokens of all heads (or channels) for all tokens of some heads,
compute, and exchange the results back.

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
"""Triton versions that compile fla's kernels to wrong gradients: from the first up to, but not including, the second
(flash-linear-attention, issue 640)."""


def fast_kernels_obstacle(title: str, device: torch.device) -> str | None:
    """Returns why flash-linear-attention's kernels cannot be used, with the remedy; None if they can. `title` is the
    mixer's name."""
    if device.type != "cuda":
        return f"{title} has kernels on CUDA only: use a GPU"
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
    """Returns whether a mixer that is too slow without flash-linear-attention's kernels uses them: in bfloat16 on
    CUDA.

    Raises:
        InputError: the kernels are missing or wrong.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    if (obstacle := fast_kernels_obstacle(title, device)) is not None:
        raise InputError(f"model.path: {obstacle}")
    return True


def own_channels(weight: Tensor, sections: Sections, groups: tuple[dist.ProcessGroup | None, ...]) -> Tensor:
    """Returns this rank's rows of a weight of all channels, [C, ...], cut by each group in turn; None groups are
    skipped."""
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
    """Computes a function that needs all tokens of each sequence, in order. Returns [t, heads, V] for this rank's
    tokens.

    Args:
        compute: maps the tensors with all tokens, `by_heads` with this rank's heads first, to [T, h, V].
        by_heads: [t, heads, ...] of this rank's tokens, redistributed by heads.
        of_all_heads: [t, ...], gathered whole on every rank.
    """
    parts = (*by_heads, *of_all_heads)
    if cp_group is not None:
        whole = tuple(AllGatherCP.apply(part, cp_group, "sum") for part in of_all_heads)
        parts = (*to_heads(by_heads, cp_group), *whole)
    if microbatch.restore is not None:  # drops pads and restores the order of tokens
        parts = tuple(part.index_select(0, microbatch.restore) for part in parts)
    mixed = compute(*parts)
    if microbatch.restore is not None:
        size = 1 if cp_group is None else cp_group.size()
        whole_row = mixed.new_zeros(microbatch.num_tokens * size, *mixed.shape[1:])
        mixed = whole_row.index_copy(0, microbatch.restore, mixed)
    return mixed if cp_group is None else from_heads(mixed, cp_group)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Causal convolution within every sequence, [T, C].

    Args:
        weight: taps [C, W]; the last is the token's own.
        offsets: index of each token in its sequence, int64 [T].
    """
    total = inputs * weight[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(inputs, (0, 0, back, 0))[: len(inputs)] * (offsets >= back)[:, None]
        total = total + earlier * weight[:, -1 - back]
    return total if bias is None else total + bias


def convolve_heads(
    parts: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None, offsets: Tensor
) -> tuple[Tensor, ...]:
    """Applies `convolve` and SiLU to several tensors [T, heads, d]. `weight` and `bias` hold their channels one after
    the other."""
    joined = F.silu(convolve(torch.cat([part.flatten(1) for part in parts], dim=-1), weight, bias, offsets))
    pieces = joined.split([part[0].numel() for part in parts], dim=-1)
    return tuple(piece.unflatten(1, part.shape[1:]) for piece, part in zip(pieces, parts, strict=True))
