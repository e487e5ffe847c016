"""The manifest of an exported folder: the size and hash of each of its files, so that damage does not load silently.

Folders may come from elsewhere: names in a manifest must stay within the folder. Hashes show damage, but do not protect
against forgery.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from automodel_rl.errors import InputError

MANIFEST = "manifest.json"

HASHED_AT_START = 2**26
"""Bytes of the largest file whose content a run compares when it starts; of larger ones only the size."""

CHUNK = 2**24
"""Bytes of a file that are read and hashed at once."""


@dataclass(frozen=True)
class StoredFile:
    """Size and hash of a file when it was written.

    Attributes:
        bytes: the size in bytes.
        hash: the 128-bit XXH3 hash, hexadecimal. It shows damage, but does not protect against forgery.
    """

    bytes: int
    hash: str


def hash_file(path: Path) -> StoredFile:
    """Size and hash of a file."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            size += len(chunk)
    return StoredFile(size, state.hexdigest())


def hash_values(values: Any) -> str:
    """A hash of JSON values, whatever the order of keys."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def inner_name(name: str) -> str:
    """A file's name, if it stays within its folder; else ValueError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not a name within the folder")
    return name


def write_manifest(folder: Path, known: Mapping[str, StoredFile] | None = None) -> None:
    """Writes the manifest of all files of a folder. Call it when they are written.

    Args:
        folder: the folder.
        known: sizes and hashes of some of its files, which are not read again.
    """
    files = dict(known or {})
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.name not in files and path.name != MANIFEST:
            files[path.name] = hash_file(path)
    values = {name: asdict(files[name]) for name in sorted(files)}
    (folder / MANIFEST).write_text(json.dumps({"files": values, "hash": hash_values(values)}, indent=1))


def read_manifest(folder: Path) -> dict[str, StoredFile]:
    """The files that a folder's manifest names.

    Raises:
        InputError: there is no manifest, or it is damaged.
    """
    file = folder / MANIFEST
    try:
        values = json.loads(file.read_text())
        if values["hash"] != hash_values(values["files"]):
            raise ValueError("its hash is another")
        return {inner_name(name): StoredFile(**stored) for name, stored in values["files"].items()}
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no {MANIFEST}, so nothing says what its files were: only folders that a run or export has "
            "written have one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: damaged ({type(error).__name__}: {error}): copy the folder again or, if its other files are "
            "right, remove this one"
        ) from None


def check_exported(folder: Path, *, whole: bool) -> dict[str, StoredFile]:
    """Compares the files of an exported folder with its manifest.

    Args:
        folder: the folder.
        whole: whether the content of large files is compared, too, and not only their size.

    Returns:
        The files that the manifest names; none without a manifest, if `whole` is not asked for.

    Raises:
        InputError: a file is missing or differs.
    """
    if not whole and not (folder / MANIFEST).is_file():
        return {}
    files = read_manifest(folder)
    problem = first_difference(folder, files, files, HASHED_AT_START if not whole else None)
    if problem is not None:
        raise InputError(
            f"{folder / problem[0]}: {problem[1]}: copy it again or, if the change is meant, remove {MANIFEST}, which "
            "names the files as they were written"
        )
    return files


def first_difference(
    folder: Path, files: Mapping[str, StoredFile], names: Iterable[str], largest: int | None = None
) -> tuple[str, str] | None:
    """The first file that is missing or differs, and what is wrong with it; None if all are as they were.

    Args:
        folder: the folder.
        files: sizes and hashes of its files.
        names: names of the files to compare.
        largest: bytes of the largest file whose content is compared; None for all.

    Raises:
        OSError: a file cannot be read.
    """
    for name in names:
        path, written = folder / name, files[name]
        if not path.is_file():
            return name, "is missing"
        size = path.stat().st_size
        if size != written.bytes:
            return name, f"has {size} bytes but was written with {written.bytes}"
        if (largest is None or size <= largest) and hash_file(path).hash != written.hash:
            return name, "differs from what was written (its hash is another)"
    return None
