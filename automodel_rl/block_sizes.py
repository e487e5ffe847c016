"""Block sizes: how much is processed at once where the whole would not fit into memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class BlockSizes:
    """Block sizes. They affect results only by rounding.

    Attributes:
        head_bytes: bytes of logits in memory at once on a GPU; 1/32 of that on a CPU.
        head_group: blocks whose gradients, in the compute dtype, are in memory at once. With more, the accumulated
            head gradient is read and written less often.
        elementwise_bytes: bytes of logits per unfused elementwise operation; 1/16 of that on a CPU.
        forward_microbatches: microbatches per pass without gradients, enough to keep a pipeline full most of the
            time.
        bucket_bytes: bytes of whole tensors gathered at once; a larger tensor is gathered alone.
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
    """Shrinks `block_sizes` in the block, so that even a few short sequences need several blocks of each kind. For
    tests."""
    before = dict(vars(block_sizes))
    vars(block_sizes).update(
        head_bytes=2**18, head_group=2, elementwise_bytes=2**16, forward_microbatches=2, bucket_bytes=2**13
    )
    try:
        yield
    finally:
        vars(block_sizes).update(before)
