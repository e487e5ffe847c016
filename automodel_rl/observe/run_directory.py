"""The run directory: whose run it holds, and where its files are."""

import shutil
from pathlib import Path

import yaml

from automodel_rl.config import Section, differing_keys, dump_config
from automodel_rl.errors import InputError

LIMITS = ("length.steps", "length.epochs")
"""Keys that a resumed run may change."""


class RunDirectory:
    """Files of one run.

    Args:
        config: has the folder in `output`.
        resume: whether to go on with the run that is there.

    Raises:
        InputError: the folder holds another run, or this one and `resume` is not set.
    """

    def __init__(self, config: Section, output: str, resume: bool):
        self.folder = Path(output)
        self.config_text = dump_config(config)
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise InputError(f"output={output}: is a file; a run needs a folder of its own")
        if not self.config_file.is_file():
            if any(self.folder.iterdir()):
                raise InputError(f"output={output}: the folder holds files that are not a run's: choose another")
            return
        keys = differing_keys(yaml.safe_load(self.config_file.read_text()), yaml.safe_load(self.config_text))
        other = [key for key in keys if key not in LIMITS]
        if other:
            raise InputError(
                f"output={output}: the folder holds another run (it differs in {', '.join(other[:5])}): choose another "
                "folder, or use that run's config to resume it"
            )
        if not resume:
            raise InputError(
                f"output={output}: the folder holds this run already: add --resume auto, or choose another"
            )

    def create(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(self.config_text)

    def keep_checkpoints(self, keep: set[Path]) -> None:
        """Removes all other checkpoints."""
        for path in self.checkpoints.glob("step_*"):
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def final(self) -> Path:
        return self.folder / "final"
