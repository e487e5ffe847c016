"""Experiment trackers, which get the records of metrics.jsonl, too.

To add one: a class with `write` and `close`, an entry of `TRACKERS`, and its name in `config/run.py`.
"""

import importlib
import importlib.util
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import yaml

from automodel_rl.config.run import ObserveConfig, TrackerName
from automodel_rl.errors import InputError
from automodel_rl.files import write_complete
from automodel_rl.observe.run_directory import RunDirectory


class Tracker(Protocol):
    """Somewhere that metrics go to, step by step."""

    def write(self, record: dict[str, Any]) -> None:
        """One step's metrics; `record["step"]` is the step, and values may be None."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run directory. Those of steps that run again after a resume are dropped.

    Args:
        directory: of the run.
        project: not used; the folder is the run.
        first_step: steps that were done before.
    """

    def __init__(self, directory: RunDirectory, project: str, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # needs the tensorboard package

        self.writer = SummaryWriter(str(directory.folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _measured(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases. A resumed run goes on in the same place, by an id that is kept in its directory.

    Args:
        directory: of the run.
        project: that the run belongs to.
        first_step: not used: of steps that come again it keeps what it had.
    """

    def __init__(self, directory: RunDirectory, project: str, first_step: int):
        name = _kept_name(directory)
        config = yaml.safe_load(directory.config_text)
        self.module = importlib.import_module("wandb")
        self.module.init(project=project, id=name, name=name, config=config, resume="allow", dir=str(directory.folder))

    def write(self, record: dict[str, Any]) -> None:
        self.module.log(_measured(record), step=record["step"])

    def close(self) -> None:
        self.module.finish()


class Trackio(Wandb):
    """trackio, whose interface is wandb's, but that a run's name is its id."""

    def __init__(self, directory: RunDirectory, project: str, first_step: int):
        config = yaml.safe_load(directory.config_text)
        self.module = importlib.import_module("trackio")
        self.module.init(project=project, name=_kept_name(directory), config=config, resume="allow")


TRACKERS: dict[TrackerName, Callable[[RunDirectory, str, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
"""By the name of the package that each needs."""


def check_trackers(config: ObserveConfig) -> None:
    """Raises InputError if a tracker's package is not installed."""
    for name in config.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # none, or a folder of that name, such as wandb leaves behind
            raise InputError(f"observe.trackers: {name} is not installed: pip install '{name}', or leave it out")


def make_trackers(config: ObserveConfig, directory: RunDirectory, first_step: int) -> list[Tracker]:
    """Starts the trackers of a run, whose directory is there."""
    return [TRACKERS[name](directory, config.project, first_step) for name in config.trackers]


def _measured(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if value is not None and name != "step"}


def _kept_name(directory: RunDirectory) -> str:
    """The run's name for trackers: its folder's, made unique when the run begins and kept."""
    file: Path = directory.folder / "tracked_as"
    if not file.is_file():
        write_complete(file, f"{directory.folder.absolute().name}-{uuid.uuid4().hex[:8]}")
    return file.read_text()
