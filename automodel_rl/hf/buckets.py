"""Buckets: buffers that hold a stage's whole tensors under their Hugging Face names.

A bucket holds chunks of tensors of one dtype, back to back. A receiver needs only the `Plan` to read it. Each rank
casts its shards first; then one collective per mesh axis that shards the tensors fills the bucket, however many there
are.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from automodel_rl.block_sizes import block_sizes
from automodel_rl.compat.operations import copy_each
from automodel_rl.families.known import CheckpointFamily
from automodel_rl.hf.names import pieces
from automodel_rl.parallel.collectives import all_gather
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import (
    Box,
    boxes_of_ranks,
    local_box,
    local_tensor,
    overlap,
    relative,
    sharded_axes,
)


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor of a checkpoint; `dtype` is that in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Chunk:
    """A contiguous range of a tensor in a bucket, in elements.

    Attributes:
        tensor: index in `Plan.tensors`.
        start: first element in the flattened tensor.
        count: number of elements.
        offset: first element in the bucket.
    """

    tensor: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """The contents of a filled buffer, from its first byte."""

    dtype: torch.dtype
    numel: int
    chunks: tuple[Chunk, ...]
    is_frozen: bool = False

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def elements(self, buffer: Tensor) -> Tensor:
        """Returns the filled part of a buffer (uint8) in the bucket's dtype, [numel]."""
        return buffer[: self.num_bytes].view(self.dtype)


@dataclass(frozen=True)
class Plan:
    """The tensors that a sender sends, and its buckets in order, which hold every tensor exactly once."""

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]

    @property
    def largest_bucket(self) -> int:
        """Required buffer size in bytes."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Source:
    """A tensor of the model on this rank.

    Attributes:
        tensor: the parameter or buffer, sharded or whole.
        dtype: the dtype in which it is sent.
        read: returns the values of this rank's shard, in any dtype.
        is_frozen: whether training never changes the values.
    """

    name: str
    tensor: Tensor
    dtype: torch.dtype
    read: Callable[[], Tensor]
    is_frozen: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype, *, is_frozen: bool = False) -> "Source":
        """Returns a source that sends the tensor's own values."""
        return cls(name, tensor, dtype, functools.partial(local_tensor, tensor), is_frozen)


@dataclass(frozen=True)
class _Region:
    """A box of a source that is contiguous in memory, and its offset in a bucket."""

    source: int
    box: Box
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return _sizes(self.box)

    def within(self, elements: Tensor) -> Tensor:
        """Returns the region's part of a bucket's elements."""
        return elements[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


@dataclass
class _OpenBucket:
    """A bucket being filled. `axes` are the mesh axes that shard its tensors."""

    axes: tuple[str, ...]
    dtype: torch.dtype
    is_frozen: bool
    numel: int = 0
    regions: list[_Region] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


_Share = list[tuple[_Region, Box]]
"""A rank's share of a bucket: regions, and the boxes of them that the rank holds and sends back to back."""


@dataclass(frozen=True)
class _Gathering:
    """How a bucket is filled from the shards of a stage's ranks.

    Attributes:
        own: this rank's share, in order: source indices, and boxes of this rank's shards.
    """

    axes: tuple[str, ...]
    shares: list[_Share]
    own: list[tuple[int, Box]]


class StageBuckets:
    """Packs the tensors of this rank's stages into buckets. All ranks of a stage build it from the same tensors.

    Args:
        sources: this rank's sources, in an order that all ranks of the stage share.
        max_bytes: maximum bucket size. A larger tensor takes several buckets, or with `whole` one of its own size.
        whole: whether every checkpoint tensor must be in one bucket.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        family: CheckpointFamily,
        layout: Layout,
        max_bytes: int,
        *,
        whole: bool = False,
    ):
        self.sources, self.layout, self.max_bytes, self.whole = list(sources), layout, max_bytes, whole
        self._boxes = [boxes_of_ranks(source.tensor) for source in self.sources]
        self._own_boxes = [local_box(source.tensor) for source in self.sources]
        tensors: list[TensorSpec] = []
        closed: list[_OpenBucket] = []
        open_: dict[tuple[tuple[str, ...], torch.dtype, bool], _OpenBucket] = {}
        for number, source in enumerate(self.sources):
            names = _Names(source, family, first=len(tensors))
            tensors += names.specs
            closed += self._place(number, source, names, open_)
        full = sorted([*closed, *open_.values()], key=lambda bucket: bucket.regions[0].source)
        self._gatherings = [_Gathering(b.axes, self._shares(b.regions), self._own(b.regions)) for b in full]
        self.plan = Plan(tuple(tensors), tuple(Bucket(b.dtype, b.numel, tuple(b.chunks), b.is_frozen) for b in full))

    def reread(self, sources: Sequence[Source]) -> None:
        """Replaces the sources, for the same tensors."""
        self.sources = list(sources)

    def targets(self, number: int, buffer: Tensor) -> list[Tensor]:
        """Returns the views of a buffer that `pack` writes bucket `number` to, valid as long as the buffer. It is
        uint8, of at least `plan.largest_bucket` bytes, on the layout's device."""
        whole = self.plan.buckets[number].elements(buffer)
        return [
            region.within(whole)[relative(box, region.box)]
            for share in self._gatherings[number].shares
            for region, box in share
        ]

    @torch.no_grad()
    def pack(self, number: int, targets: list[Tensor]) -> None:
        """Fills a buffer with bucket `number`, given its `targets`. Every rank of the stage packs all buckets in
        order: packing sharded tensors is a collective."""
        gathering, bucket = self._gatherings[number], self.plan.buckets[number]
        own = list(self._own_shards(gathering))
        if not gathering.axes:
            copy_each(targets, own)
            return
        longest = max(sum(math.prod(_sizes(box)) for _, box in share) for share in gathering.shares)
        gathered = torch.zeros(longest, dtype=bucket.dtype, device=self.layout.device)
        copy_each(_stretches(gathered, [shard.shape for shard in own]), own)
        for axis in reversed(gathering.axes):
            gathered = all_gather(gathered, self.layout.group_of(axis))
        ranks = gathered.view(len(gathering.shares), longest)
        sent = [
            stretch
            for rank, share in zip(ranks, gathering.shares, strict=True)
            for stretch in _stretches(rank, [_sizes(box) for _, box in share])
        ]
        copy_each(targets, sent)

    def _place(
        self, number: int, source: Source, names: "_Names", open_: dict[Any, _OpenBucket]
    ) -> Iterator[_OpenBucket]:
        """Adds a source to the open bucket of its kind. Yields full buckets."""
        kind = sharded_axes(source.tensor), source.dtype, source.is_frozen
        capacity = self.max_bytes // source.dtype.itemsize
        shape = tuple(source.tensor.shape) or (1,)
        cut = 0 if self.whole else _cut_dim(shape, capacity)
        rest, unit = [slice(0, size) for size in shape[cut + 1 :]], math.prod(shape[cut + 1 :])
        least = shape[0] if self.whole and not names.by_expert else 1
        for lead in itertools.product(*map(range, shape[:cut])):
            start = 0
            while start < shape[cut]:
                bucket = open_.setdefault(kind, _OpenBucket(*kind))
                room = (capacity - bucket.numel) // unit
                if room < least and bucket.regions:
                    yield open_.pop(kind)
                    continue
                stop = min(shape[cut], start + max(room, least))
                box = (*(slice(i, i + 1) for i in lead), slice(start, stop), *rest)
                region = _Region(number, box if source.tensor.ndim else (), bucket.numel)
                bucket.regions.append(region)
                bucket.chunks += names.chunks(region.box, bucket.numel)
                bucket.numel += math.prod(region.shape)
                start = stop

    def _shares(self, regions: Sequence[_Region]) -> list[_Share]:
        """Returns each rank's share of a bucket's regions."""
        num_ranks = len(self._boxes[regions[0].source])
        return [
            [
                (region, met)
                for region in regions
                if (met := overlap(region.box, self._boxes[region.source][rank])) is not None
            ]
            for rank in range(num_ranks)
        ]

    def _own(self, regions: Sequence[_Region]) -> list[tuple[int, Box]]:
        """Returns this rank's share of the regions: source indices, and boxes of this rank's shards."""
        met = [(region.source, overlap(region.box, self._own_boxes[region.source])) for region in regions]
        return [(source, relative(box, self._own_boxes[source])) for source, box in met if box is not None]

    def _own_shards(self, gathering: _Gathering) -> Iterator[Tensor]:
        """Yields the tensors that this rank sends. Each source is read only once, since a read may merge adapters."""
        for source, group in itertools.groupby(gathering.own, key=lambda pair: pair[0]):
            shard = self.sources[source].read().detach()
            yield from (shard[box] for _, box in group)


class _Names:
    """The checkpoint tensors that make up a source: consecutive ranges of its memory."""

    def __init__(self, source: Source, family: CheckpointFamily, first: int):
        self.shape = tuple(source.tensor.shape)
        found = list(pieces(source.name, self.shape, family))
        self.by_expert = any(piece.expert is not None for piece in found)
        self.specs = [TensorSpec(piece.name, piece.shape, source.dtype) for piece in found]
        self.first = first
        self.ends = list(itertools.accumulate(math.prod(piece.shape) for piece in found))

    def chunks(self, box: Box, offset: int) -> Iterator[Chunk]:
        """Yields the chunks of a contiguous box of the source that starts at `offset` of a bucket."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        start = sum(part.start * stride for part, stride in zip(box, strides, strict=True))
        stop = start + math.prod(_sizes(box))
        begin = 0
        for number, end in enumerate(self.ends):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield Chunk(self.first + number, low - begin, high - low, offset + low - start)
            begin = end


def whole_tensors(sources: Iterable[Source], family: CheckpointFamily, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yields names and whole tensors of this rank's stages on all ranks of the stage. A collective of these ranks."""
    buckets = StageBuckets(list(sources), family, layout, block_sizes.bucket_bytes, whole=True)
    for number, bucket in enumerate(buckets.plan.buckets):
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=layout.device)
        buckets.pack(number, buckets.targets(number, buffer))
        for chunk in bucket.chunks:
            spec = buckets.plan.tensors[chunk.tensor]
            yield spec.name, bucket.elements(buffer)[chunk.offset : chunk.offset + chunk.count].view(spec.shape)


def _cut_dim(shape: Sequence[int], capacity: int) -> int:
    """Returns the dim to cut a tensor along: the first of which one index fits into a bucket, else the last."""
    fitting = (dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= capacity)
    return next(fitting, len(shape) - 1)


def _stretches(elements: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """Returns consecutive views of `elements` in these shapes."""
    shapes = list(shapes)
    ends = itertools.accumulate(map(math.prod, shapes))
    return [elements[end - math.prod(shape) : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)
