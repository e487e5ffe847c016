"""Mapping from a model's tensors to those of a Hugging Face checkpoint, which have other names and may hold experts
one by one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from automodel_rl.families.known import CheckpointFamily
from automodel_rl.parallel.sharding import Box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FUSED = re.compile(r"(.*)\.\w+\.experts\.(gate_up_proj|up_proj|down_proj)$")


def is_stack(name: str) -> bool:
    """Returns whether a model name refers to a layer's stacked expert weights."""
    return FUSED.match(name) is not None


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, and the box of the model's tensor that it fills.

    Attributes:
        name, shape: in the checkpoint.
        expert: index in the model tensor's first dim, if the checkpoint has a tensor per expert; else None.
        rows: rows of the model's tensor (or of its expert) that it fills, with all columns.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    rows: slice

    def overlap(self, box: Box) -> tuple[Box, Box] | None:
        """Returns the overlap with a box of the model's tensor, as a box of the piece and as a box within `box`."""
        inner = box
        if self.expert is not None:
            if not box[0].start <= self.expert < box[0].stop:
                return None
            inner = box[1:]
        start, stop = max(inner[0].start, self.rows.start), min(inner[0].stop, self.rows.stop)
        if start >= stop:
            return None
        within_piece = (slice(start - self.rows.start, stop - self.rows.start), *inner[1:])
        own = [slice(start - inner[0].start, stop - inner[0].start), *(slice(0, s.stop - s.start) for s in inner[1:])]
        if self.expert is not None:
            own.insert(0, slice(self.expert - box[0].start, self.expert - box[0].start + 1))
        return within_piece, tuple(own)


def pieces(name: str, shape: tuple[int, ...], family: CheckpointFamily) -> Iterator[Piece]:
    """Yields the checkpoint tensors that make up a model's tensor."""
    start, in_files = next((pair for pair in family.file_names.prefixes if name.startswith(pair[0])), ("", ""))
    name = in_files + name.removeprefix(start)
    for in_model, in_files in family.file_names.renamed:
        name = re.sub(in_model, in_files, name)
    for pattern, parts in family.file_names.cut:
        if re.search(pattern, name):
            yield from _one_after_another(name, shape, pattern, parts)
            return
    names = family.file_names.experts
    fused = FUSED.match(name)
    if names is None or fused is None:
        name = name if names is None else name.replace(".mlp.", f".{names.block}.")
        yield Piece(name, shape, None, slice(0, shape[0]) if shape else slice(0, 1))
        return
    layer, kind = fused.groups()
    num_experts, rows, columns = shape
    single = {"down_proj": names.down, "up_proj": names.up}
    of_expert = (single[kind],) if kind in single else (names.gate, names.up)
    size = rows // len(of_expert)
    for expert in range(num_experts):
        for number, part in enumerate(of_expert):
            yield Piece(
                f"{layer}.{names.block}.experts.{expert}.{part}.weight",
                (size, columns),
                expert,
                slice(number * size, (number + 1) * size),
            )


def _one_after_another(
    name: str, shape: tuple[int, ...], pattern: str, parts: tuple[tuple[str, int], ...]
) -> Iterator[Piece]:
    """Yields the pieces of a tensor that is cut along its rows."""
    start = 0
    for text, rows in parts:
        yield Piece(re.sub(pattern, text, name), (rows, *shape[1:]), None, slice(start, start + rows))
        start += rows


def to_hf(name: str, tensor: Tensor, family: CheckpointFamily) -> Iterator[tuple[str, Tensor]]:
    """Yields names and values of the checkpoint tensors that make up a whole tensor of the model."""
    for piece in pieces(name, tuple(tensor.shape), family):
        whole = tensor if piece.expert is None else tensor[piece.expert]
        yield piece.name, whole[piece.rows] if whole.ndim else whole
