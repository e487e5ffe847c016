"""Token sequences packed into microbatches: only tensors and lists, no process groups."""

from automodel_rl.batch.batch import EPISODE_TOKENS, Batch, RoutesAt
from automodel_rl.batch.bins import DataShare, assign_bins, pack, share_bins
from automodel_rl.batch.local_microbatch import LEAST_TOKENS, AttentionCall, LocalMicrobatch, local_microbatch
from automodel_rl.batch.media import (
    Audio,
    Image,
    Media,
    MediaTokens,
    RotaryGrid,
    Source,
    Video,
    distinct_media,
    multimodal_positions,
    single_media_tokens,
)
from automodel_rl.batch.microbatch import (
    IGNORED_TARGET,
    Microbatch,
    TokenSequence,
    add_values,
    empty_microbatch,
    in_packed_order,
    pack_microbatch,
    set_values,
    spread_over_tokens,
    sum_by_sequence,
    unpack,
)
from automodel_rl.batch.packing import Packing, StepSize
from automodel_rl.batch.routes import RouterShape, Routes, join_routes, read_routes

__all__ = [
    "EPISODE_TOKENS",
    "IGNORED_TARGET",
    "LEAST_TOKENS",
    "AttentionCall",
    "Audio",
    "Batch",
    "DataShare",
    "Image",
    "LocalMicrobatch",
    "Media",
    "MediaTokens",
    "Microbatch",
    "Packing",
    "RotaryGrid",
    "RouterShape",
    "Routes",
    "RoutesAt",
    "Source",
    "StepSize",
    "TokenSequence",
    "Video",
    "add_values",
    "assign_bins",
    "distinct_media",
    "empty_microbatch",
    "in_packed_order",
    "join_routes",
    "local_microbatch",
    "multimodal_positions",
    "pack",
    "pack_microbatch",
    "read_routes",
    "set_values",
    "share_bins",
    "single_media_tokens",
    "spread_over_tokens",
    "sum_by_sequence",
    "unpack",
]
