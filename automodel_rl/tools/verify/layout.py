"""Chooses the layout to verify. Imports are light, as the launcher needs the number of ranks before starting them."""

from automodel_rl.config import ParallelConfig, RunConfig
from automodel_rl.errors import InputError

MAX_RANKS = 16
"""Maximum number of local ranks. Larger layouts lose data ranks, as more than two reveal nothing new."""


def ranks_to_verify(config: RunConfig) -> int:
    """Returns the number of ranks that the comparison runs on. Raises InputError if `components` needs more than
    `MAX_RANKS`."""
    if config.components is None:
        return layout_to_verify(config.parallel).world_size
    if config.components.world_size > MAX_RANKS:
        raise InputError(
            f"components has {config.components.world_size} ranks and verify runs on at most {MAX_RANKS}: pass a "
            "config with fewer data ranks of each component"
        )
    return config.components.world_size


def layout_to_verify(parallel: ParallelConfig) -> ParallelConfig:
    """Removes data ranks while the layout has more ranks than `MAX_RANKS`."""
    while parallel.world_size > MAX_RANKS:
        smaller = _with_fewer_data_ranks(parallel)
        if smaller is None:
            return parallel
        parallel = smaller
    return parallel


def _with_fewer_data_ranks(parallel: ParallelConfig) -> ParallelConfig | None:
    for name, size in (("dp_replicate", parallel.dp_replicate), ("dp_shard", parallel.dp_shard)):
        for fewer in range(size - 1, 1, -1):
            smaller = parallel.model_copy(update={name: fewer})
            if smaller.expert_ranks % parallel.ep == 0:
                return smaller
    return None
