"""Files of published versions: in a folder, or at an address that fsspec reads, as https://HOST/weights or s3://BUCKET."""

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from fsspec import AbstractFileSystem, Callback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from automodel_rl.errors import InputError, innermost

T = TypeVar("T")

VERSION_FILE = "version.json"

NEWEST_FILE = "newest.json"
"""Name of the file with the newest version's number, for those who cannot list the folder, as on most web servers."""

NUMBERED = re.compile(r"\d{8,19}", re.ASCII)
"""Names of the folders of versions."""

MAX_DESCRIPTION_BYTES = 2**28
"""Largest file that describes a version, in bytes: that of 100,000 tensors takes 10 MB."""

MAX_NEWEST_BYTES = 2**20
"""Largest file that names the newest version, in bytes."""

TRIES = 5
"""Attempts to read something from elsewhere, each after twice as long a wait as the one before, from half a second."""

SILENCE = 60.0
"""Longest wait in seconds for a web server's next bytes. A file as a whole may take any time."""


class VersionFiles:
    """Reads the files of published versions.

    Args:
        place: the folder of versions, or its address.
        headers: returns the headers of one request of a URL, for http and https.

    Raises:
        InputError: fsspec knows no such address, or lacks a package for it.

    Example:
        >>> VersionFiles(Path("runs/math/weights")).newest()
        12
    """

    def __init__(self, place: Path | str, headers: Callable[[str], dict[str, str]] | None = None):
        self.place = str(place)
        options: dict[str, Any] = {}
        if self.place.startswith(("http://", "https://")):
            patient = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
            options = {"client_kwargs": {"timeout": patient}}
        try:
            opened = (
                (LocalFileSystem(), str(place.absolute())) if isinstance(place, Path) else url_to_fs(place, **options)
            )
        except (ValueError, ImportError, OSError) as error:
            reason = innermost(error)
            raise InputError(f"{self.place}: cannot be opened ({reason}): give a folder or an address") from None
        self._system: AbstractFileSystem = opened[0]
        self._root: str = opened[1]
        self._is_here = isinstance(self._system, LocalFileSystem)
        self._headers = headers

    def where(self, number: int, name: str = "") -> str:
        """The path or address of a version, or of a file in it."""
        return f"{self._root.rstrip('/')}/{number:08d}" + (f"/{name}" if name else "")

    def newest(self) -> int | None:
        """The number of the newest version; None if there is none yet.

        Raises:
            InputError: it cannot be read.
        """
        try:
            if self._is_here:
                return max(numbers_in(Path(self._root)), default=None)
            with self._copied(f"{self._root.rstrip('/')}/{NEWEST_FILE}", MAX_NEWEST_BYTES) as file:
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(
                f"{self.place}: cannot be read ({error.strerror}): see whether it is yours to read"
            ) from None
        try:
            return int(json.loads(content)["version"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(f"{self.place}/{NEWEST_FILE}: names no version ({innermost(error)})") from None

    def description(self, number: int) -> bytes:
        """The content of a version's own file.

        Raises:
            FileNotFoundError: it is not there.
            InputError: it cannot be read, or is too large to be one.
        """
        with self._copied(self.where(number, VERSION_FILE), MAX_DESCRIPTION_BYTES) as file:
            return file.read()

    @contextlib.contextmanager
    def opened(self, number: int, name: str, num_bytes: int, *, is_shared: bool = True) -> Iterator[BufferedReader]:
        """A file of a version, which is copied first if it is elsewhere, or if others must not change it meanwhile.

        Args:
            number: the version.
            name: the file's name, within the version's folder.
            num_bytes: the file's size; a larger one is not copied.
            is_shared: whether all who can write to the folder are trusted.

        Raises:
            FileNotFoundError: it is not there.
            InputError: it cannot be read.
        """
        at = self.where(number, name)
        if self._is_here and is_shared:
            _check_file(at, num_bytes)
            with open(at, "rb") as file:
                yield file
            return
        with self._copied(at, num_bytes) as file:
            yield file

    @contextlib.contextmanager
    def _copied(self, at: str, max_bytes: int) -> Iterator[BufferedReader]:
        """A copy of a file. Raises InputError if that is larger than it may be."""
        if self._is_here:
            _check_file(at, max_bytes)
        with tempfile.NamedTemporaryFile(prefix="version_") as copy:
            self._tried(
                lambda at, **options: self._system.get_file(at, copy.name, callback=_Bound(at, max_bytes), **options),
                at,
            )
            with open(copy.name, "rb") as file:
                yield file

    def _tried(self, read: Callable[..., T], at: str) -> T:
        """What a function reads at a path or address, which is tried again if it is from elsewhere."""
        for attempt in range(TRIES):
            try:
                options = {} if self._headers is None else {"headers": self._headers(at)}
                return read(at, **options)
            except (FileNotFoundError, InputError):
                raise
            except Exception as error:  # each file system has its own
                problem = innermost(error)
            if self._is_here or attempt == TRIES - 1:
                break
            time.sleep(0.5 * 2**attempt)
        raise InputError(f"{self.place}: cannot be read ({problem}): see whether it is there, and is yours to read")


class _Bound(Callback):
    """Ends the reading of a file that turns out to be too large, by its stated size or by what has come."""

    def __init__(self, at: str, max_bytes: int):
        super().__init__()
        self.at, self.max_bytes = at, max_bytes

    def set_size(self, size: int | None) -> None:
        super().set_size(size)
        _check_size(self.at, size or 0, self.max_bytes)

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        _check_size(self.at, self.value, self.max_bytes)


def _check_file(at: str, max_bytes: int) -> None:
    """Raises InputError for a file of this machine that is too large, or none that ends, such as a pipe."""
    about = os.stat(at)
    if not stat.S_ISREG(about.st_mode):
        raise InputError(f"{at}: is no ordinary file: use nothing of it")
    _check_size(at, about.st_size, max_bytes)


def _check_size(at: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InputError(f"{at}: has {num_bytes:,} bytes, and at most {max_bytes:,} are read: use nothing of it")


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the complete versions in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name) for path in folder.iterdir() if NUMBERED.fullmatch(path.name) and (path / VERSION_FILE).is_file()
    )


def note_newest(folder: Path, number: int) -> None:
    """Writes which version in a folder is the newest."""
    unfinished = folder / f".{NEWEST_FILE}.unfinished"
    unfinished.write_text(json.dumps({"version": number}))
    unfinished.replace(folder / NEWEST_FILE)
