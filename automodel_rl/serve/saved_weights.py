"""The table of saved weights: `tinker://` paths, each a key of the table, and their folders on disk."""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from automodel_rl.config import LoraConfig
from automodel_rl.errors import InputError, innermost
from automodel_rl.files import write_complete
from automodel_rl.serve.messages import RunShape

Kind = Literal["weights", "sampler_weights"]
"""weights: for training, with the optimizer's moments. sampler_weights: to sample from."""

ABOUT, DELETED = "run.json", "deleted"
"""The file that says what saved weights are, and one in the folder of those that are deleted once nobody reads them."""

PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


OF_ADAPTERS = ("alpha", "rslora", "targets")
"""Settings of adapters without which saved ones mean nothing. A server that trains all weights has none."""


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
        origin: what they belong to: the base model, and the adapters' settings.
    """

    path: str
    folder: Path
    shape: RunShape
    created: float
    expires: float | None
    user_metadata: dict[str, Any] | None
    origin: dict[str, Any]

    @property
    def run(self) -> str:
        """The run that they are of."""
        match = PATH.fullmatch(self.path)
        assert match is not None
        return match[1]

    @property
    def kind(self) -> Kind:
        """What they are for."""
        return "weights" if "/weights/" in self.path else "sampler_weights"

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return bytes_in(self.folder)


class UnwritableError(Exception):
    """The disk does not let saved weights be changed."""


class SavedWeights:
    """All saved weights of a service, also of its earlier starts.

    Args:
        folder: the folder that holds them.
        limit: most bytes of them together.
        lora: the adapters' settings of this start of the service; None if it trains all weights.
        base: the base model of this start.
    """

    def __init__(self, folder: Path, limit: float, lora: LoraConfig | None, base: str):
        self.folder, self.limit, self.rank = folder, limit, 0 if lora is None else lora.rank
        settings = {} if lora is None else lora.model_dump(mode="json", include={*OF_ADAPTERS})
        self.origin = {"base": base, **dict.fromkeys(OF_ADAPTERS), **settings}
        self._table: dict[str, Saved] = {}
        for file in sorted(folder.glob(f"*/*/*/{ABOUT}")):
            if file.parent.name.startswith("."):  # unfinished
                continue
            if (file.parent / DELETED).exists():
                remove_folder(file.parent)
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

    def usable(self, path: str) -> Saved:
        """The saved weights of a path, if this start of the service can compute with them.

        Raises:
            InputError: there are none, or they belong to another base model or other settings of adapters.
        """
        saved = self[path]
        other = next((key for key in self.origin if saved.origin.get(key) != self.origin[key]), None)
        if other is not None:
            raise InputError(
                f"{path}: belongs to {other}={saved.origin.get(other)}, and this server has {self.origin[other]}: "
                "start it as it was, or train anew"
            )
        if saved.shape.rank > self.rank:
            raise InputError(
                f"{path}: has adapters of rank {saved.shape.rank}, and this server's model.lora.rank is {self.rank}: "
                "start it with a larger one"
            )
        return saved

    def is_current(self, saved: Saved) -> bool:
        """Whether weights are still in the table: not deleted, nor overwritten."""
        return self._table.get(saved.path) == saved

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
        folder = self.folder / run / kind / f"{name}@{now:.6f}"  # others may still read what it replaces
        return Saved(path, folder, replace(shape, first=0), now, expires, body.user_metadata, self.origin)

    def add(self, saved: Saved) -> Saved | None:
        """Puts weights that are complete into the table. Returns those that they replace."""
        before = self._table.get(saved.path)
        self._table[saved.path] = saved
        return before

    def take(self, path: str) -> Saved:
        """Takes saved weights out of the table, also for later starts of the service.

        Raises:
            InputError: there are none.
            UnwritableError: the disk does not let go of them; they are still in the table.
        """
        saved = self[path]
        try:
            (saved.folder / DELETED).touch()
        except FileNotFoundError:
            pass  # somebody has removed them
        except OSError as error:
            raise UnwritableError(f"{path}: cannot be deleted ({error.strerror}: {saved.folder})") from None
        del self._table[path]
        return saved

    def put_off(self, path: str, seconds: float | None) -> None:
        """Lets weights expire so many seconds from now, or never, in this start of the service."""
        self._table[path] = replace(self[path], expires=None if seconds is None else time.time() + seconds)

    def set_ttl(self, path: str, seconds: float | None) -> None:
        """Lets weights expire so many seconds from now, or never, also in later starts of the service.

        Raises:
            InputError: there are none.
            UnwritableError: that cannot be written; it is as before.
        """
        before = self[path]
        self.put_off(path, seconds)
        try:
            values = json.loads((before.folder / ABOUT).read_text())
            write_complete(before.folder / ABOUT, json.dumps({**values, "expires": self[path].expires}))
        except (OSError, ValueError) as error:
            self._table[path] = before
            raise UnwritableError(f"{path}: its time cannot be changed ({innermost(error)})") from None

    @property
    def all(self) -> list[Saved]:
        """All that are there."""
        return [*self._table.values()]

    @property
    def expired(self) -> list[str]:
        """Paths of what may be deleted."""
        now = time.time()
        return [path for path, saved in self._table.items() if saved.expires is not None and saved.expires < now]

    def newest(self, run: str, kind: Kind = "weights") -> Saved | None:
        """The newest weights of a run, by default those that it can be trained on from."""
        own = [saved for path, saved in self._table.items() if path.startswith(f"tinker://{run}/{kind}/")]
        return max(own, key=lambda saved: saved.created, default=None)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return bytes_in(self.folder)


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # ranks rename folders meanwhile
                total += (Path(place) / name).stat().st_size
    return total


def remove_folder(folder: Path) -> None:
    """Removes the folder of saved weights that are deleted, and says so if it cannot be removed."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # somebody else has removed it
    except OSError as error:
        print(f"warning: {folder}: cannot be removed ({error.strerror}): remove it", file=sys.stderr, flush=True)


def about(saved: Saved) -> dict[str, Any]:
    """What `run.json` says of saved weights."""
    return {
        "path": saved.path,
        "shape": asdict(saved.shape),
        "created": saved.created,
        "expires": saved.expires,
        "user_metadata": saved.user_metadata,
        "origin": saved.origin,
    }


def _read(file: Path) -> Saved | None:
    """The entry of a folder; None if it is damaged."""
    try:
        values = json.loads(file.read_text())
        shape = RunShape(**values["shape"])
        path = values["path"]
        if PATH.fullmatch(path) is None:
            raise ValueError(f"{path} is no path")
        known = {key: values[key] for key in ("created", "expires", "user_metadata", "origin")}
        return Saved(path, file.parent, shape, **known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"warning: {file}: is damaged ({innermost(error)}): its weights are passed over", file=sys.stderr)
        return None
