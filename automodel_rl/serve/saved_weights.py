"""The table of saved weights: `tinker://` paths, each a key of the table, and their folders on disk."""

import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from automodel_rl.errors import InputError
from automodel_rl.serve.messages import RunShape

Kind = Literal["weights", "sampler_weights"]
"""weights: for training, with the optimizer's moments. sampler_weights: to sample from."""

ABOUT = "run.json"

PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


@dataclass(frozen=True)
class Saved:
    """Saved weights.

    Attributes:
        path: their `tinker://` path.
        folder: their folder.
        shape: the shape of the run that they are of.
        created: when they were saved, in seconds since 1970.
        expires: when they may be deleted; None for never.
        user_metadata: what the client said of the run.
    """

    path: str
    folder: Path
    shape: RunShape
    created: float
    expires: float | None
    user_metadata: dict[str, Any] | None

    @property
    def run(self) -> str:
        """The run that they are of."""
        match = PATH.fullmatch(self.path)
        assert match is not None
        return match[1]


class SavedWeights:
    """All saved weights of a service, also of its earlier starts.

    Args:
        folder: the folder that holds them.
        limit: most bytes of them together.
    """

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit = folder, limit
        self._table: dict[str, Saved] = {}
        for file in sorted(folder.glob(f"*/*/*/{ABOUT}")):
            if file.parent.name.startswith("."):  # unfinished
                continue
            saved = _read(file)
            if saved is not None:
                self._table[saved.path] = saved

    def __getitem__(self, path: str) -> Saved:
        """The saved weights of a path.

        Raises:
            InputError: there are none.
        """
        if path not in self._table:
            raise InputError(f"there are no saved weights {path!r}: look at the paths that saving returned")
        return self._table[path]

    def __len__(self) -> int:
        return len(self._table)

    def new(self, run: str, kind: Kind, name: str, shape: RunShape, body: Any) -> Saved:
        """An entry for weights that are to be saved; `add` puts it into the table once they are.

        Args:
            run, kind, name: the parts of the path.
            shape: the run's shape.
            body: the request's `ttl_seconds`, `overwrite` and `user_metadata`.

        Raises:
            InputError: the name is taken and may not be overwritten, or the disk's share is used up.
        """
        path = f"tinker://{run}/{kind}/{name}"
        if path in self._table and not body.overwrite:
            raise InputError(f"{path}: there are such weights, and overwrite is false: choose another name")
        used = self.num_bytes
        if used >= self.limit:
            raise InputError(
                f"saved weights take {used / 2**30:.1f} GiB, and limits.disk_gib is {self.limit / 2**30:g}: delete "
                "some, or raise the limit"
            )
        now = time.time()
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        return Saved(path, self.folder / run / kind / name, shape, now, expires, body.user_metadata)

    def add(self, saved: Saved) -> None:
        """Puts weights that are complete into the table."""
        self._table[saved.path] = saved

    def delete(self, path: str) -> None:
        """Deletes saved weights.

        Raises:
            InputError: there are none.
        """
        saved = self[path]
        del self._table[path]
        shutil.rmtree(saved.folder, ignore_errors=True)

    def delete_expired(self) -> None:
        """Deletes what may be deleted."""
        now = time.time()
        for path in [p for p, saved in self._table.items() if saved.expires is not None and saved.expires < now]:
            self.delete(path)

    def newest(self, run: str) -> Saved | None:
        """The newest weights of a run that it can be trained on from."""
        own = [saved for path, saved in self._table.items() if path.startswith(f"tinker://{run}/weights/")]
        return max(own, key=lambda saved: saved.created, default=None)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        files = (Path(folder) / name for folder, _, names in os.walk(self.folder) for name in names)
        return sum(file.stat().st_size for file in files if file.is_file())


def about(saved: Saved) -> dict[str, Any]:
    """What `run.json` says of saved weights."""
    return {
        "path": saved.path,
        "shape": asdict(saved.shape),
        "created": saved.created,
        "expires": saved.expires,
        "user_metadata": saved.user_metadata,
    }


def _read(file: Path) -> Saved | None:
    """The entry of a folder; None if it is damaged."""
    try:
        values = json.loads(file.read_text())
        shape = RunShape(**values["shape"])
        path = values["path"]
        if PATH.fullmatch(path) is None:
            return None
        return Saved(path, file.parent, shape, values["created"], values["expires"], values["user_metadata"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
