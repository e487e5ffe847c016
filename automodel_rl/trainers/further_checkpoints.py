"""Checkpoints of models trained beside the policy, such as critics."""

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from automodel_rl.errors import InputError
from automodel_rl.policy.policy import Policy


class FurtherCheckpoints:
    """Checkpoints of further trained models: checkpoints/NAME/step_N belongs to checkpoints/step_N, the policy's.
    They are written first, so that a policy's checkpoint always has them.

    Args:
        models: the models by name.
        folder: the folder with the policy's checkpoints.
        texts: text files in every checkpoint, by name.
    """

    def __init__(self, policy: Policy, models: Mapping[str, Policy], folder: Path, texts: dict[str, str]):
        self.policy, self.models, self.folder = policy, models, folder
        for model in models.values():
            model.crew.ask(model.name, "open_saver", texts, False)

    def problem_of(self, of_policy: Path) -> str:
        """Returns why a policy's checkpoint lacks a valid one of a further model; empty if it has all."""
        for name, model in self.models.items():
            folder = _beside(of_policy, name)
            newest, problems = model.crew.ask(model.name, "newest_checkpoint", [folder])
            if newest is None:
                return str(problems[0]).removeprefix("warning: ") if problems else f"{folder} is missing"
        return ""

    @contextlib.contextmanager
    def _ready(self, model: Policy) -> Iterator[None]:
        """Moves a model to the device in the block. A model kept on the host takes turns with the policy."""
        with self.policy.off_device() if model.is_on_host else contextlib.nullcontext(), model.on_device():
            yield

    def save(self, of_policy: Path, step: int) -> str | None:
        """Writes the checkpoints that belong to the policy's folder `of_policy`. Returns an error, or None."""
        for name, model in self.models.items():
            folder = _beside(of_policy, name)
            folder.parent.mkdir(parents=True, exist_ok=True)
            with self._ready(model):
                error: str | None = model.crew.ask(model.name, "save_checkpoint", folder, {"step": step}, {})
            if error is not None:
                return error
        return None

    def load(self, of_policy: Path) -> None:
        """Loads the checkpoints that belong to the policy's folder `of_policy`.

        Raises:
            InputError: one is missing or damaged.
        """
        for name, model in self.models.items():
            folder = _beside(of_policy, name)
            if not folder.is_dir():
                raise InputError(f"{of_policy}: the checkpoint of the {name}, {folder}, is missing: pass another one")
            with self._ready(model):
                model.crew.ask(model.name, "check_checkpoint", folder)
                model.crew.ask(model.name, "load_checkpoint", folder)

    def remove_others(self, kept: Collection[str]) -> None:
        """Removes all checkpoints whose folder names are not in `kept`."""
        for name in self.models:
            for folder in (self.folder / name).glob("step_*"):
                if folder.name not in kept:
                    shutil.rmtree(folder)


def _beside(of_policy: Path, name: str) -> Path:
    return of_policy.parent / name / of_policy.name
