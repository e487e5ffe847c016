"""How much is worked on at once where the whole would not fit into memory: sizes of this process."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class BlockSizes:
    """Sizes of blocks. No number depends on them but by rounding.

    Attributes:
        head_tokens: whose logits exist at once: 512 x 152k x 4 bytes is 0.3 GiB.
        forward_microbatches: of one pass without gradients; enough that a pipeline is full most of the time.
        bucket_bytes: that are gathered at once of whole tensors, or one tensor if that is larger.
    """

    head_tokens: int = 512
    forward_microbatches: int = 64
    bucket_bytes: int = 2**29


block_sizes = BlockSizes()
"""Of this process."""


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Within this block sizes are so small that a few short sequences need several of each."""
    before = dict(vars(block_sizes))
    vars(block_sizes).update(head_tokens=7, forward_microbatches=2, bucket_bytes=2**13)
    try:
        yield
    finally:
        vars(block_sizes).update(before)
