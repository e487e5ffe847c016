"""Experiment trackers, which receive the records of metrics.jsonl.

To add one, write a class with `write` and `close`, add it to `TRACKERS`, and its name to `config/run.py`.
"""

import importlib
import importlib.util
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from automodel_rl.config.run import ObserveConfig, TrackerName
from automodel_rl.config.strict_yaml import parse_yaml
from automodel_rl.errors import InputError
from automodel_rl.files import write_atomic
from automodel_rl.observe.metrics import step_of_metric
from automodel_rl.observe.run_directory import RunDirectory


class Tracker(Protocol):
    """Receiver of metrics, step by step."""

    def write(self, record: dict[str, Any]) -> None:
        """Receives the metrics of one step, `record["step"]`. Values may be None."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard event files in the run directory. On resuming, events of steps that will run again are dropped.
    `project` is ignored, as the folder names the run."""

    def __init__(self, directory: RunDirectory, project: str, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # needs the tensorboard package

        self.writer = SummaryWriter(str(directory.folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _measured(record).items():
            self.writer.add_scalar(name, value, step_of_metric(record, name))

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases. A resumed run continues under the same id, which is stored in the run directory.
    `first_step` is ignored: for steps that run again, Weights & Biases keeps its earlier metrics."""

    def __init__(self, directory: RunDirectory, project: str, first_step: int):
        name = _kept_name(directory)
        config = parse_yaml(directory.config_text)
        self.module = importlib.import_module("wandb")
        self.module.init(project=project, id=name, name=name, config=config, resume="allow", dir=str(directory.folder))

    def write(self, record: dict[str, Any]) -> None:
        self.module.log(_measured(record), step=record["step"])

    def close(self) -> None:
        self.module.finish()


class Trackio(Wandb):
    """trackio, with the interface of wandb, except that a run's name is its id."""

    def __init__(self, directory: RunDirectory, project: str, first_step: int):
        config = parse_yaml(directory.config_text)
        self.module = importlib.import_module("trackio")
        self.module.init(project=project, name=_kept_name(directory), config=config, resume="allow")


TRACKERS: dict[TrackerName, Callable[[RunDirectory, str, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
"""Trackers by name, which is also that of the required package."""


def check_trackers(config: ObserveConfig) -> None:
    """Raises InputError if a tracker's package is not installed."""
    for name in config.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: just a folder of that name, such as wandb leaves behind
            raise InputError(f"observe.trackers: {name} is not installed: pip install '{name}', or remove it")


def make_trackers(config: ObserveConfig, directory: RunDirectory, first_step: int) -> list[Tracker]:
    return [TRACKERS[name](directory, config.project, first_step) for name in config.trackers]


def _measured(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if value is not None and name != "step"}


def _kept_name(directory: RunDirectory) -> str:
    """The run's name for trackers: the folder's name with a random suffix, generated once and stored in a file."""
    file: Path = directory.folder / "tracked_as"
    if not file.is_file():
        write_atomic(file, f"{directory.folder.absolute().name}-{uuid.uuid4().hex[:8]}")
    return file.read_text()
