"""Checkpoints of models that are trained beside the policy, such as critics."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from automodel_rl.checkpoint.folder import MARKER
from automodel_rl.errors import InputError
from automodel_rl.policy import jobs
from automodel_rl.policy.policy import Policy


class FurtherCheckpoints:
    """Checkpoints of further trained models, each in a folder beside those of the policy: checkpoints/NAME/step_N
    belongs to checkpoints/step_N. They are written first, so that a policy's checkpoint has all of them.

    Args:
        models: the models by name.
        folder: the folder with the policy's checkpoints.
        texts: texts of the files that go into every checkpoint, by name.
    """

    def __init__(self, models: Mapping[str, Policy], folder: Path, texts: dict[str, str]):
        self.models, self.folder = models, folder
        for model in models.values():
            model.crew.ask(jobs.OpenSaver(texts, in_background=False))

    def are_whole(self, of_policy: Path) -> bool:
        """Whether every model has the checkpoint that belongs to one of the policy, undamaged.

        Args:
            of_policy: the folder of the policy's checkpoint.
        """
        for name, model in self.models.items():
            folder = _beside(of_policy, name)
            if not (folder / MARKER).is_file() or model.crew.ask(jobs.NewestCheckpoint([folder]))[0][0] is None:
                return False
        return True

    def save(self, of_policy: Path, step: int) -> str | None:
        """Writes the checkpoints that will belong to one of the policy.

        Args:
            of_policy: the folder of the policy's checkpoint.
            step: number of steps that are done.

        Returns:
            Why one could not be written; None if all were.
        """
        for name, model in self.models.items():
            folder = _beside(of_policy, name)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with model.on_device():
                error: str | None = model.crew.ask(jobs.SaveCheckpoint(folder, {"step": step}, {}))[0]
            if error is not None:
                return error
        return None

    def load(self, of_policy: Path) -> None:
        """Goes back to the checkpoints that belong to one of the policy.

        Args:
            of_policy: the folder of the policy's checkpoint.

        Raises:
            InputError: one is missing or damaged.
        """
        for name, model in self.models.items():
            folder = _beside(of_policy, name)
            if not folder.is_dir():
                raise InputError(f"{of_policy}: the checkpoint of the {name} is missing, {folder}: give another one")
            with model.on_device():
                model.crew.ask(jobs.CheckCheckpoint(folder))
                model.crew.ask(jobs.LoadCheckpoint(folder))

    def remove_others(self, kept: Collection[str]) -> None:
        """Removes all but some checkpoints.

        Args:
            kept: the names of the folders of the policy's checkpoints that are kept.
        """
        for name in self.models:
            for folder in (self.folder / name).glob("step_*"):
                if folder.name not in kept:
                    shutil.rmtree(folder)


def _beside(of_policy: Path, name: str) -> Path:
    return of_policy.parent / name / of_policy.name
