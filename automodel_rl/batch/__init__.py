"""Packed microbatches: pure tensors and lists, no process groups."""

from automodel_rl.batch.bins import DataShare, assign_bins, pack, share_bins
from automodel_rl.batch.images import Image, ImageTokens, multimodal_positions
from automodel_rl.batch.local_row import AttentionCall, LocalRow, local_row
from automodel_rl.batch.packed import (
    IGNORED_TARGET,
    PackedBatch,
    TokenSequence,
    add_values,
    empty_row,
    in_packed_order,
    pack_row,
    set_values,
    spread_over_tokens,
    sum_by_sequence,
    unpack,
)
from automodel_rl.batch.routes import RouterShape, Routes, join_routes, read_routes

__all__ = [
    "IGNORED_TARGET",
    "AttentionCall",
    "DataShare",
    "Image",
    "ImageTokens",
    "LocalRow",
    "PackedBatch",
    "RouterShape",
    "Routes",
    "TokenSequence",
    "add_values",
    "assign_bins",
    "empty_row",
    "in_packed_order",
    "join_routes",
    "local_row",
    "multimodal_positions",
    "pack",
    "pack_row",
    "read_routes",
    "set_values",
    "share_bins",
    "spread_over_tokens",
    "sum_by_sequence",
    "unpack",
]
