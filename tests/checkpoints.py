"""Checkpoints of an engine without a run around it."""

from pathlib import Path
from typing import Any

from automodel_rl.checkpoint.folder import CONFIG
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.engine import Engine


def save_checkpoint(
    engine: Engine, folder: Path, progress: dict[str, Any], rank_state: dict[str, Any], *, in_background: bool = False
) -> None:
    """Writes a checkpoint and waits for it. A collective."""
    saver = CheckpointSaver(engine, {CONFIG: ""}, in_background=in_background)
    assert saver.save(folder, {"step": engine.step, **progress}, rank_state, lambda _: None) is None
    assert saver.wait() is None
