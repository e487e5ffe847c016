"""Sizes of blocks: how much is worked on at once when the whole would not fit into memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class BlockSizes:
    """Sizes of blocks. They change results only by rounding.

    Attributes:
        head_tokens: number of tokens whose logits exist at once: 512 x 152k x 4 bytes is 0.3 GiB.
        forward_microbatches: number of microbatches in one pass without gradients; with this many, a pipeline is full
            most of the time.
        bucket_bytes: bytes of whole tensors that are gathered at once; a larger tensor is gathered alone.
    """

    head_tokens: int = 512
    forward_microbatches: int = 64
    bucket_bytes: int = 2**29


block_sizes = BlockSizes()
"""The block sizes of this process."""


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Makes `block_sizes` so small that even a few short sequences need several blocks of each kind. For tests."""
    before = dict(vars(block_sizes))
    vars(block_sizes).update(head_tokens=7, forward_microbatches=2, bucket_bytes=2**13)
    try:
        yield
    finally:
        vars(block_sizes).update(before)
