"""Resuming from a checkpoint: selection, integrity check, and restoring."""

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


def newest_intact(folders: Sequence[Path], group: dist.ProcessGroup, warn: Callable[[str], None]) -> Path | None:
    """Returns the newest intact checkpoint, or None. A collective.

    Args:
        folders: checkpoint folders, oldest first.
    """
    for folder in reversed(folders):
        try:
            check_intact(folder, group)
        except CheckpointError as error:
            warn(f"warning: {error}; falling back to the previous one")
            continue
        return folder
    return None


def check_intact(folder: Path, group: dist.ProcessGroup) -> None:
    """Compares all files of a checkpoint with its marker, each rank its share of the files. A collective.

    Raises:
        CheckpointError: on every rank, if the checkpoint is incomplete or damaged.
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
    """Restores weights, optimizer state, step and random state in place, on any layout. A collective.

    Returns:
        The saved `progress`, and this rank's saved `rank_state`; rank 0's if this rank did not exist when it was
        written.

    Raises:
        CheckpointError: the checkpoint holds other weights than the engine trains, or it is damaged.
    """
    restore_tensors(engine, folder / TENSORS)
    own = folder / rank_file(dist.get_rank())
    is_new = not own.is_file()
    rank_state = read_json(folder / rank_file(0) if is_new else own)
    progress = read_json(folder / PROGRESS)
    try:
        if not is_new:  # a new rank keeps its own random state
            set_random_state(rank_state["random"], engine.handle.layout.device)
        engine.step = progress["engine"]["step"]
        engine.skipped_in_a_row = progress["engine"]["skipped_in_a_row"]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: damaged state ({type(error).__name__}: {error}): use another one") from None
    return progress, rank_state
