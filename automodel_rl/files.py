"""Files and folders that appear under their names only when complete, and temporary folders."""

import contextlib
import fcntl
import functools
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_rl.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


IN_RUST = re.compile(r"\(os error \d+\)")
"""Pattern of I/O errors raised by libraries written in Rust, such as tokenizers and safetensors."""


TEMPORARY_PREFIX = "automodel_rl-tmp-"
"""Prefix of temporary folders. Earlier releases, which did not lock their folders, used another."""

SETTLED_SECONDS = 60
"""Age after which an unlocked temporary folder counts as abandoned: a new one is locked a moment after its creation."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """Temporary folder of this process, in `parent` or the system's default. The first one of a process also removes
    those left by killed processes."""

    def __init__(self, parent: Path | None = None):
        _remove_abandoned(Path(parent or tempfile.gettempdir()))
        super().__init__(prefix=TEMPORARY_PREFIX, dir=parent, ignore_cleanup_errors=True)
        self._lock: int | None = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        super().cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@functools.cache
def _remove_abandoned(parent: Path) -> None:
    """Removes the temporary folders of killed processes. Cached, as it scans all of the parent."""
    for folder in parent.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                state = os.fstat(descriptor)
                if state.st_uid == os.getuid() and time.time() - state.st_mtime > SETTLED_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def is_io_error(error: Exception) -> bool:
    """Whether an error is an I/O error. Some libraries raise a plain `Exception` for these."""
    return isinstance(error, OSError) or IN_RUST.search(str(error)) is not None


def check_writable(folder: Path, named: str) -> None:
    """Checks before long work that a folder can be written to or created.

    Args:
        named: what the user gave, for the message.

    Raises:
        InputError: the folder, or its nearest existing parent, is a file or not writable.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{named}: {existing} is not a writable folder: choose another")


@contextlib.contextmanager
def as_input_error(named: str) -> Iterator[None]:
    """Turns I/O errors of the block into InputErrors.

    Args:
        named: what the user gave, for the message.
    """
    try:
        yield
    except Exception as error:
        if not is_io_error(error):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{named}: cannot be written ({reason}): make room, or choose another place") from None


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder for one process to fill. It gets its name if the block succeeds; otherwise it is
    removed.

    Raises:
        InputError: the folder exists, or cannot be written.
    """
    if os.path.lexists(folder):
        raise InputError(f"{folder}: already exists; the command creates its own folder, so name a new one")
    check_writable(folder, str(folder))
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    try:
        with as_input_error(str(folder)):
            unfinished.mkdir(parents=True)
            yield unfinished
            publish_folder(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_atomic(path: Path, text: str) -> None:
    """Writes a text file atomically, replacing an existing one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise it may be empty after a power failure
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)  # frees its space if the disk is full
        raise


@contextlib.contextmanager
def atomic_folder(folder: Path, group: "ProcessGroup") -> Iterator[Path]:
    """Yields an empty folder for several ranks to fill. It gets its name once all ranks have left the block. A
    collective.

    Args:
        folder: the final name, on a file system that the ranks share; an existing folder is replaced.

    Raises:
        OSError: on every rank, if the folder cannot be created or renamed.
    """
    from torch import distributed as dist  # deferred: launchers write files too, and must not wait for torch

    def on_first(work: Callable[[], None]) -> None:
        """Runs work on the first rank. If it fails, all ranks raise, so that none waits for another."""
        problem: list[OSError | None] = [None]
        if group.rank() == 0:
            try:
                work()
            except OSError as error:
                problem = [error]
        dist.broadcast_object_list(problem, group=group, group_src=0)
        if problem[0] is not None:
            raise problem[0]

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    unfinished = folder.with_name(f".{folder.name}.unfinished")
    on_first(begin)
    try:
        yield unfinished
        dist.barrier(group)
        on_first(lambda: publish_folder(unfinished, folder))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def publish_folder(unfinished: Path, folder: Path) -> None:
    """Renames a complete folder to its final name. An older folder of that name is moved aside first and removed
    last."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_private(path: Path, text: str, *, replaces: bool = True) -> None:
    """Writes a file atomically that only its owner may read. Creates its folder.

    Args:
        replaces: whether to replace an existing file.

    Raises:
        FileExistsError: the file exists and may not be replaced.
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(unfinished, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        if replaces:
            unfinished.replace(path)
        else:
            os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
