"""Going on from a checkpoint: which one, whether it is whole, and everything it holds back in its place."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from automodel_rl.checkpoint.folder import (
    PROGRESS,
    TENSORS,
    CheckpointError,
    check_files,
    rank_file,
    read_json,
    read_marker,
)
from automodel_rl.checkpoint.random_state import set_random_state
from automodel_rl.checkpoint.state import restore_tensors
from automodel_rl.engine.engine import Engine
from automodel_rl.parallel.host_collectives import gather_objects


def newest_whole(folders: Sequence[Path], group: dist.ProcessGroup, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole. A collective.

    Args:
        folders: oldest first.
        group: of all ranks.
        warn: told of every one that is passed over.
    """
    for folder in reversed(folders):
        try:
            check_whole(folder, group)
        except CheckpointError as error:
            warn(f"warning: {error}; going back to the one before")
            continue
        return folder
    return None


def check_whole(folder: Path, group: dist.ProcessGroup) -> None:
    """Compares all files of a checkpoint with what was written; each rank reads its share. A collective.

    Raises:
        CheckpointError: on every rank, the folder is not a whole checkpoint.
    """
    problem = None
    try:
        marker = read_marker(folder)
        check_files(folder, marker, sorted(marker.files)[group.rank() :: group.size()])
    except CheckpointError as error:
        problem = str(error)
    for found in gather_objects(problem, group):
        if found is not None:
            raise CheckpointError(found)


def load_checkpoint(engine: Engine, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restores weights, moments, step and random state in place, on the layout that wrote them or on another. A
    collective.

    Args:
        engine: of the model that was trained.
        folder: that is whole.

    Returns:
        The `progress` that was saved, and the `rank_state` of this rank, or of the first where fewer have written it.

    Raises:
        CheckpointError: the checkpoint holds other weights than those that are trained.
    """
    restore_tensors(engine, folder / TENSORS)
    own = folder / rank_file(dist.get_rank())
    is_new = not own.is_file()
    rank_state = read_json(folder / rank_file(0) if is_new else own)
    progress = read_json(folder / PROGRESS)
    try:
        if not is_new:  # a rank that there was not before keeps a random state of its own
            set_random_state(rank_state["random"], engine.handle.layout.device)
        engine.step = progress["engine"]["step"]
        engine.skipped_in_a_row = progress["engine"]["skipped_in_a_row"]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: damaged state ({type(error).__name__}: {error}): use another one") from None
    return progress, rank_state
