"""Saved weights, by `tinker://` path, and their folders on disk."""

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
from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.files import write_atomic
from automodel_rl.serve.messages import RunShape

Kind = Literal["weights", "sampler_weights"]
"""weights: for training, with the optimizer moments. sampler_weights: for sampling only."""

ABOUT, DELETED = "run.json", "deleted"
"""The file that describes saved weights, and the file that marks a folder to be deleted once it is no longer read."""

PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


ADAPTER_SETTINGS = ("alpha", "rslora", "targets")
"""Adapter settings that saved adapters depend on. A server that trains all weights has none."""


@dataclass(frozen=True)
class Saved:
    """Saved weights.

    Attributes:
        path: their `tinker://` path.
        shape: shape of their run.
        created: Unix time in seconds.
        expires: Unix time from which they may be deleted; None for never.
        user_metadata: the client's metadata of the run.
        origin: base model and adapter settings.
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
        match = PATH.fullmatch(self.path)
        assert match is not None
        return match[1]

    @property
    def kind(self) -> Kind:
        return "weights" if "/weights/" in self.path else "sampler_weights"

    @property
    def num_bytes(self) -> int:
        return bytes_in(self.folder)


class UnwritableError(Exception):
    """Saved weights cannot be changed on disk."""


class SavedWeights:
    """All saved weights of a service, including those of its earlier starts.

    Args:
        limit: most bytes of all of them.
        lora: adapter settings of this start of the service; None if it trains all weights.
        base: base model of this start.
    """

    def __init__(self, folder: Path, limit: float, lora: LoraConfig | None, base: str):
        self.folder, self.limit, self.rank = folder, limit, 0 if lora is None else lora.rank
        settings = {} if lora is None else lora.model_dump(mode="json", include={*ADAPTER_SETTINGS})
        self.origin = {"base": base, **dict.fromkeys(ADAPTER_SETTINGS), **settings}
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
        """Raises InputError if there are none under this path."""
        if path not in self._table:
            raise InputError(f"unknown saved weights {path!r}: use a path that saving returned")
        return self._table[path]

    def usable(self, path: str) -> Saved:
        """Returns saved weights that this start of the service can load.

        Raises:
            InputError: there are none, or they belong to another base model or other adapter settings.
        """
        saved = self[path]
        other = next((key for key in self.origin if saved.origin.get(key) != self.origin[key]), None)
        if other is not None:
            raise InputError(
                f"{path}: belongs to {other}={saved.origin.get(other)}, and this server has {self.origin[other]}: "
                "start it as before, or train again"
            )
        if saved.shape.rank > self.rank:
            raise InputError(
                f"{path}: has adapters of rank {saved.shape.rank}, and this server's model.lora.rank is {self.rank}: "
                "start it with a larger rank"
            )
        return saved

    def is_current(self, saved: Saved) -> bool:
        """Whether weights have been neither deleted nor overwritten."""
        return self._table.get(saved.path) == saved

    def __len__(self) -> int:
        return len(self._table)

    def new(self, run: str, kind: Kind, name: str, shape: RunShape, body: Any) -> Saved:
        """Creates the entry of weights that are about to be saved; `add` puts it into the table afterwards.

        Args:
            run, kind, name: the parts of the path.
            body: has `ttl_seconds`, `overwrite` and `user_metadata`.

        Raises:
            InputError: the name is taken and may not be overwritten, or the disk limit is reached.
        """
        path = f"tinker://{run}/{kind}/{name}"
        if path in self._table and not body.overwrite:
            raise InputError(f"{path}: these weights exist and overwrite is false: choose another name")
        used = self.num_bytes
        if used >= self.limit:
            raise InputError(
                f"saved weights take {used / 2**30:.1f} GiB, and limits.disk_gib is {self.limit / 2**30:g}: delete "
                "some, or raise the limit"
            )
        now = time.time()
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        folder = self.folder / run / kind / f"{name}@{now:.6f}"  # the folder it replaces may still be read
        return Saved(path, folder, replace(shape, first=0), now, expires, body.user_metadata, self.origin)

    def add(self, saved: Saved) -> Saved | None:
        """Adds complete weights to the table. Returns those that they replace."""
        before = self._table.get(saved.path)
        self._table[saved.path] = saved
        return before

    def take(self, path: str) -> Saved:
        """Removes saved weights from the table, also for later starts of the service.

        Raises:
            InputError: there are none.
            UnwritableError: they cannot be marked as deleted on disk, and stay in the table.
        """
        saved = self[path]
        try:
            (saved.folder / DELETED).touch()
        except FileNotFoundError:
            pass  # they have been removed already
        except OSError as error:
            raise UnwritableError(f"{path}: cannot be deleted ({error.strerror}: {saved.folder})") from None
        del self._table[path]
        return saved

    def set_expiry(self, path: str, seconds: float | None) -> None:
        """Sets the expiry to `seconds` from now, or never, for this start of the service only."""
        self._table[path] = replace(self[path], expires=None if seconds is None else time.time() + seconds)

    def set_ttl(self, path: str, seconds: float | None) -> None:
        """Sets the expiry to `seconds` from now, or never, also for later starts of the service.

        Raises:
            InputError: there are none.
            UnwritableError: it cannot be written; the expiry is unchanged.
        """
        before = self[path]
        self.set_expiry(path, seconds)
        try:
            values = json.loads((before.folder / ABOUT).read_text())
            write_atomic(before.folder / ABOUT, json.dumps({**values, "expires": self[path].expires}))
        except (OSError, ValueError) as error:
            self._table[path] = before
            raise UnwritableError(f"{path}: its expiry cannot be changed ({describe_root_cause(error)})") from None

    @property
    def all(self) -> list[Saved]:
        return [*self._table.values()]

    @property
    def expired(self) -> list[str]:
        now = time.time()
        return [path for path, saved in self._table.items() if saved.expires is not None and saved.expires < now]

    def newest(self, run: str, kind: Kind = "weights") -> Saved | None:
        """Returns a run's newest weights of a kind, by default those it can resume from."""
        own = [saved for path, saved in self._table.items() if path.startswith(f"tinker://{run}/{kind}/")]
        return max(own, key=lambda saved: saved.created, default=None)

    @property
    def num_bytes(self) -> int:
        return bytes_in(self.folder)


def bytes_in(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # ranks may rename folders meanwhile
                total += (Path(place) / name).stat().st_size
    return total


def remove_folder(folder: Path) -> None:
    """Removes a folder of deleted weights. Prints a warning if that fails."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # it has been removed already
    except OSError as error:
        print(f"warning: {folder}: cannot be removed ({error.strerror}): remove it", file=sys.stderr, flush=True)


def about(saved: Saved) -> dict[str, Any]:
    return {
        "path": saved.path,
        "shape": asdict(saved.shape),
        "created": saved.created,
        "expires": saved.expires,
        "user_metadata": saved.user_metadata,
        "origin": saved.origin,
    }


def _read(file: Path) -> Saved | None:
    """Reads the entry of a folder; None if it is damaged."""
    try:
        values = json.loads(file.read_text())
        shape = RunShape(**values["shape"])
        path = values["path"]
        if PATH.fullmatch(path) is None:
            raise ValueError(f"{path} is not a path")
        known = {key: values[key] for key in ("created", "expires", "user_metadata", "origin")}
        return Saved(path, file.parent, shape, **known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"warning: {file}: is damaged ({describe_root_cause(error)}): its weights are ignored", file=sys.stderr)
        return None
