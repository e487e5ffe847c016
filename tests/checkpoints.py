"""Checkpoints of an engine without a run around it."""

from pathlib import Path
from typing import Any

from automodel_rl.checkpoint.folder import CONFIG
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.engine import Engine


def begin_checkpoint(
    engine: Engine, folder: Path, progress: dict[str, Any], rank_state: dict[str, Any]
) -> CheckpointSaver:
    """Begins to write a checkpoint, while whoever calls goes on. A collective."""
    saver = CheckpointSaver(engine, {CONFIG: ""}, in_background=True)
    assert saver.save(folder, {"step": engine.step, **progress}, rank_state) is None
    return saver


def save_checkpoint(engine: Engine, folder: Path, progress: dict[str, Any], rank_state: dict[str, Any]) -> None:
    """Writes a checkpoint. A collective."""
    saver = CheckpointSaver(engine, {CONFIG: ""}, in_background=False)
    assert saver.save(folder, {"step": engine.step, **progress}, rank_state) is None
