"""A checkpoint's folder: the marker that makes it complete, and checks of its files.

The marker is written last, and lists every file with size and hash. A folder without a marker is not a checkpoint;
one whose files differ from the marker is damaged. Folders are untrusted: file names must stay within the folder, and
nothing is unpickled.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from automodel_rl.errors import InputError
from automodel_rl.files import write_atomic
from automodel_rl.manifest import StoredFile, first_difference, hash_values, inner_name

MARKER = "checkpoint.json"

FORMAT = 3
"""Version of the folder's layout. Other versions are rejected."""

CONFIG = "config.yaml"
PROGRESS = "progress.json"
TENSORS = "tensors"
INDEX = "index.json"
"""File in `TENSORS` that maps parts of tensors to files."""

RANKS = "ranks"
TEMPLATE = "chat_template.jinja"
"""File of the chat template with which the run replaced the tokenizer's own."""

OWN_HASH = "hash"
"""Key of the marker for the hash of all its other values."""

MAX_RANKS = 2**20

HF_COPY = "hf"
"""Folder of the Hugging Face checkpoint that `checkpoint.format: both` adds. It is made from the shards after the
marker, which therefore does not list it."""

JSON_BYTES = 2**31
"""Maximum size of a JSON file to read."""


class CheckpointError(InputError):
    """A folder is not a readable checkpoint, or damaged. The message gives folder and reason."""


@dataclass(frozen=True)
class Marker:
    """The marker file's contents.

    Attributes:
        step: the step after which the checkpoint was taken.
        world_size: number of ranks that wrote it.
    """

    step: int
    world_size: int
    files: dict[str, StoredFile] = field(default_factory=dict)
    format: int = FORMAT


def rank_file(rank: int) -> str:
    """Returns the name of the file with a rank's own state, such as its random state."""
    return f"{RANKS}/rank_{rank}.json"


def is_complete(folder: Path) -> bool:
    """Returns whether a folder has a marker. Its files may still be damaged: see `check_files`."""
    return (folder / MARKER).is_file()


def write_marker(folder: Path, marker: Marker) -> None:
    """Writes the marker, which makes a folder a checkpoint. On return, everything is on disk."""
    fsync_folder(folder)
    values = asdict(marker)
    write_atomic(folder / MARKER, json.dumps(values | {OWN_HASH: hash_values(values)}, indent=1))
    fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Flushes a folder's file names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_marker(folder: Path) -> Marker:
    """Reads the marker of a checkpoint.

    Raises:
        CheckpointError: there is no marker, it has another format, or it is incomplete.
    """
    if not folder.is_dir():
        there = sorted(path.name for path in folder.parent.glob("step_*")) if folder.parent.is_dir() else []
        raise CheckpointError(
            f"{folder}: folder does not exist; {folder.parent} has {', '.join(there) or 'no checkpoints'}"
        )
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"{folder}: no {MARKER}, so it is not a complete checkpoint: pass a step_N folder")
    values = read_json(folder / MARKER)
    try:
        version = values["format"]
        if version != FORMAT:
            raise CheckpointError(
                f"{folder}: has checkpoint format {version}, but this version of automodel_rl reads format {FORMAT}: "
                "use the version that wrote it"
            )
        if values.pop(OWN_HASH, "") != hash_values(values):
            raise ValueError("hash mismatch, it was changed after it was written")
        files = {
            inner_name(name): StoredFile(int(of["bytes"]), str(of["hash"])) for name, of in values["files"].items()
        }
        marker = Marker(int(values["step"]), int(values["world_size"]), files)
        needed = (CONFIG, PROGRESS, f"{TENSORS}/{INDEX}", *map(rank_file, range(min(marker.world_size, MAX_RANKS))))
        lacks = next((name for name in needed if name not in files), None)
        if lacks is not None:
            raise ValueError(f"it does not name {lacks}")
        return marker
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / MARKER}: damaged ({type(error).__name__}: {error})") from None


def read_json(path: Path) -> Any:
    """Reads an untrusted JSON file.

    Raises:
        CheckpointError: the file is missing, too large, or not JSON.
    """
    try:
        if path.stat().st_size > JSON_BYTES:
            raise CheckpointError(f"{path}: is larger than {JSON_BYTES} bytes, the most for a file of a checkpoint")
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None


def check_files(folder: Path, marker: Marker, names: Iterable[str]) -> None:
    """Compares size and hash of the named files with the marker.

    Raises:
        CheckpointError: a file is missing or differs.
    """
    try:
        problem = first_difference(folder, marker.files, names)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}): use another checkpoint") from None
    if problem is not None:
        name, what = problem
        raise CheckpointError(f"{folder / name}: {what}: copy it again, or use another checkpoint")


def write_hashed(path: Path, text: str) -> StoredFile:
    """Writes a text file to disk, and returns its size and hash."""
    content = text.encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(content), xxhash.xxh3_128(content).hexdigest())
