"""A checkpoint's folder: the marker that makes it complete, and whether its files are what was written.

The marker is written last and names every file with its size and hash. A folder without one is no checkpoint; one whose
files differ from it is damaged. Folders may come from elsewhere, so nothing here is trusted: names stay within the
folder, and nothing is unpickled.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from automodel_rl.errors import InputError
from automodel_rl.files import write_complete

MARKER = "checkpoint.json"

FORMAT = 3
"""Version of the layout of a checkpoint's folder. Any other is refused."""

CONFIG = "config.yaml"
PROGRESS = "progress.json"
TENSORS = "tensors"
INDEX = "index.json"
"""Of the tensors."""

RANKS = "ranks"
TEMPLATE = "chat_template.jinja"
"""The chat template that the run was given in place of the tokenizer's own."""

MOST_RANKS = 2**20

HF_COPY = "hf"
"""Folder of the Hugging Face checkpoint that `checkpoint.format: both` puts beside the shards. It is made from them,
so the marker does not name it."""

CHUNK = 2**24
"""Bytes that are hashed at once."""

JSON_BYTES = 2**31
"""Largest JSON file that is read."""


class CheckpointError(InputError):
    """A folder is not a checkpoint that this version can read, or it is damaged. The message says which and why."""


@dataclass(frozen=True)
class StoredFile:
    """What a file was when it was written.

    Attributes:
        bytes: its size.
        hash: XXH3 of 128 bits, hexadecimal. It tells damage, not forgery.
    """

    bytes: int
    hash: str


@dataclass(frozen=True)
class Marker:
    """What makes a folder a checkpoint.

    Attributes:
        step: after which it was taken.
        world_size: ranks that wrote it.
        files: by name within the folder.
        format: version of the folder's layout.
    """

    step: int
    world_size: int
    files: dict[str, StoredFile] = field(default_factory=dict)
    format: int = FORMAT


def rank_file(rank: int) -> str:
    """Where a rank keeps what it needs for itself."""
    return f"{RANKS}/rank_{rank}.json"


def is_complete(folder: Path) -> bool:
    """Whether a folder has a marker. Its files may be damaged; `check_files` tells."""
    return (folder / MARKER).is_file()


def write_marker(folder: Path, marker: Marker) -> None:
    """Makes a folder a checkpoint. When this returns, everything has reached the disk."""
    sync(folder)
    write_complete(folder / MARKER, json.dumps(asdict(marker), indent=1))
    sync(folder)


def sync(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_marker(folder: Path) -> Marker:
    """The marker of a checkpoint.

    Raises:
        CheckpointError: there is none, it is of another format, or it does not say what it must.
    """
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"{folder}: no {MARKER}, so it is not a complete checkpoint: give a step_N folder")
    values = read_json(folder / MARKER)
    try:
        version = values["format"]
        if version != FORMAT:
            raise CheckpointError(
                f"{folder}: is of checkpoint format {version}, this version of automodel_rl reads format {FORMAT}: "
                "use the version that wrote it"
            )
        files = {_inner(name): StoredFile(int(of["bytes"]), str(of["hash"])) for name, of in values["files"].items()}
        marker = Marker(int(values["step"]), int(values["world_size"]), files)
        needed = (CONFIG, PROGRESS, f"{TENSORS}/{INDEX}", *map(rank_file, range(min(marker.world_size, MOST_RANKS))))
        lacks = next((name for name in needed if name not in files), None)
        if lacks is not None:
            raise ValueError(f"it does not name {lacks}")
        return marker
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / MARKER}: damaged ({type(error).__name__}: {error})") from None


def _inner(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not a name within the folder")
    return name


def read_json(path: Path) -> Any:
    """The values of a JSON file that may come from elsewhere.

    Raises:
        CheckpointError: it is not there or not JSON.
    """
    try:
        if path.stat().st_size > JSON_BYTES:
            raise CheckpointError(f"{path}: is larger than {JSON_BYTES} bytes, which no file of a checkpoint is")
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None


def check_files(folder: Path, marker: Marker, names: Iterable[str]) -> None:
    """Compares files with the marker, whole.

    Args:
        folder: of the checkpoint.
        marker: of it.
        names: of files that the marker has.

    Raises:
        CheckpointError: one is missing or differs.
    """
    for name in names:
        path, written = folder / name, marker.files[name]
        try:
            found = hash_file(path)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: {name} is missing: copy it again, or use another checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}): use another checkpoint") from None
        if found.bytes != written.bytes:
            raise CheckpointError(
                f"{path}: has {found.bytes} bytes but was written with {written.bytes}: use another one"
            )
        if found.hash != written.hash:
            raise CheckpointError(f"{path}: differs from what was written (its hash is another)")


def hash_file(path: Path) -> StoredFile:
    """Size and hash of a file."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            size += len(chunk)
    return StoredFile(size, state.hexdigest())


def write_hashed(path: Path, text: str) -> StoredFile:
    """Writes a text file to the disk; its size and hash."""
    content = text.encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(content), xxhash.xxh3_128(content).hexdigest())
