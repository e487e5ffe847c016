"""Files of published versions: in a folder, or at an address for fsspec, such as https://HOST/weights or
s3://BUCKET."""

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

from automodel_rl.errors import InputError, describe_root_cause

T = TypeVar("T")

VERSION_FILE = "version.json"

NEWEST_FILE = "newest.json"
"""Holds the newest version's number, for readers that cannot list the folder, as on most web servers."""

NUMBERED = re.compile(r"\d{8,19}", re.ASCII)
MAX_DESCRIPTION_BYTES = 2**28
"""Largest `VERSION_FILE` that is read: that of 100,000 tensors takes 10 MB."""

MAX_NEWEST_BYTES = 2**20
"""Largest `NEWEST_FILE` that is read."""

TRIES = 5
"""Attempts to read a remote file. The wait between them doubles, from half a second."""

SILENCE = 60.0
"""Seconds without data after which a web server's answer fails. There is no limit for a whole file."""


class VersionFiles:
    """Reads the files of published versions.

    Args:
        location: the folder of versions, or its address.
        headers: returns the headers of a request by its URL, for http and https.

    Raises:
        InputError: fsspec does not support the address, or lacks a package for it.

    Example:
        >>> VersionFiles(Path("runs/math/weights")).newest()
        12
    """

    def __init__(self, location: Path | str, headers: Callable[[str], dict[str, str]] | None = None):
        self.location = str(location)
        options: dict[str, Any] = {}
        if self.location.startswith(("http://", "https://")):
            patient = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
            options = {"client_kwargs": {"timeout": patient}}
        try:
            opened = (
                (LocalFileSystem(), str(location.absolute()))
                if isinstance(location, Path)
                else url_to_fs(location, **options)
            )
        except (ValueError, ImportError, OSError) as error:
            reason = describe_root_cause(error)
            raise InputError(f"{self.location}: cannot be opened ({reason}): pass a folder or a URL") from None
        self._system: AbstractFileSystem = opened[0]
        self._root: str = opened[1]
        self._is_here = isinstance(self._system, LocalFileSystem)
        self._headers = headers

    def where(self, number: int, name: str = "") -> str:
        return f"{self._root.rstrip('/')}/{number:08d}" + (f"/{name}" if name else "")

    def newest(self) -> int | None:
        """Returns the number of the newest version, if any. Raises InputError if it cannot be read."""
        try:
            if self._is_here:
                return max(numbers_in(Path(self._root)), default=None)
            with self._copied(f"{self._root.rstrip('/')}/{NEWEST_FILE}", MAX_NEWEST_BYTES) as file:
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{self.location}: cannot be read ({error.strerror}): check its permissions") from None
        try:
            return int(json.loads(content)["version"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"{self.location}/{NEWEST_FILE}: contains no version ({describe_root_cause(error)})"
            ) from None

    def description(self, number: int) -> bytes:
        """Returns the content of a `VERSION_FILE`.

        Raises:
            FileNotFoundError: it is missing.
            InputError: it cannot be read, or is too large.
        """
        with self._copied(self.where(number, VERSION_FILE), MAX_DESCRIPTION_BYTES) as file:
            return file.read()

    @contextlib.contextmanager
    def opened(self, number: int, name: str, num_bytes: int, *, is_shared: bool = True) -> Iterator[BufferedReader]:
        """Opens a file of a version: a copy if it is remote, or if others could change it meanwhile.

        Args:
            num_bytes: a larger file is refused.
            is_shared: every writer of the folder is trusted, so a local file is not copied.

        Raises:
            FileNotFoundError: it is missing.
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
        for attempt in range(TRIES):
            try:
                options = {} if self._headers is None else {"headers": self._headers(at)}
                return read(at, **options)
            except (FileNotFoundError, InputError):
                raise
            except Exception as error:  # each file system has its own
                problem = describe_root_cause(error)
            if self._is_here or attempt == TRIES - 1:
                break
            time.sleep(0.5 * 2**attempt)
        raise InputError(f"{self.location}: cannot be read ({problem}): check that it exists and is readable")


class _Bound(Callback):
    """Aborts a download that exceeds the limit."""

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
    """Raises InputError for a local file that is too large, or not a regular one, such as a pipe."""
    about = os.stat(at)
    if not stat.S_ISREG(about.st_mode):
        raise InputError(f"{at}: is not a regular file: do not use it")
    _check_size(at, about.st_size, max_bytes)


def _check_size(at: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InputError(f"{at}: has {num_bytes:,} bytes, more than the limit of {max_bytes:,}: do not use it")


def numbers_in(folder: Path) -> list[int]:
    """Returns the numbers of the complete versions in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name) for path in folder.iterdir() if NUMBERED.fullmatch(path.name) and (path / VERSION_FILE).is_file()
    )


def write_newest(folder: Path, number: int) -> None:
    unfinished = folder / f".{NEWEST_FILE}.unfinished"
    unfinished.write_text(json.dumps({"version": number}))
    unfinished.replace(folder / NEWEST_FILE)
