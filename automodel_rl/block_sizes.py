"""Sizes of blocks: how much is worked on at once when the whole would not fit into memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class BlockSizes:
    """Sizes of blocks. They change results only by rounding.

    Attributes:
        head_bytes: bytes of logits that exist at once on a GPU; on a CPU a 32nd.
        head_group: number of such blocks whose gradients, in the compute dtype, exist at once. The more, the seldomer
            the sum of the head's gradients is read and written.
        elementwise_bytes: bytes of logits that are worked on at once where nothing fuses that work; on a CPU a
            sixteenth.
        forward_microbatches: number of microbatches in one pass without gradients; with this many, a pipeline is full
            most of the time.
        bucket_bytes: bytes of whole tensors that are gathered at once; a larger tensor is gathered alone.
    """

    head_bytes: int = 2**28
    head_group: int = 4
    elementwise_bytes: int = 2**26
    forward_microbatches: int = 64
    bucket_bytes: int = 2**29


block_sizes = BlockSizes()
"""The block sizes of this process."""


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Makes `block_sizes` so small that even a few short sequences need several blocks of each kind. For tests."""
    before = dict(vars(block_sizes))
    vars(block_sizes).update(
        head_bytes=2**18, head_group=2, elementwise_bytes=2**16, forward_microbatches=2, bucket_bytes=2**13
    )
    try:
        yield
    finally:
        vars(block_sizes).update(before)
