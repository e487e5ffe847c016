"""Packed microbatches: pure tensors and lists, no process groups."""

from automodel_rl.batch.bins import assign_bins, pack, share_bins
from automodel_rl.batch.packed import IGNORED_TARGET, PackedBatch, TokenSequence, empty_row, pack_row, unpack

__all__ = [
    "IGNORED_TARGET",
    "PackedBatch",
    "TokenSequence",
    "assign_bins",
    "empty_row",
    "pack",
    "pack_row",
    "share_bins",
    "unpack",
]
