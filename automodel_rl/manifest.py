"""Manifest of an exported folder: size and hash of each file, so that damage is detected.

Folders may come from untrusted sources, so names in a manifest must stay within the folder. Hashes reveal damage but
do not protect against forgery.
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
"""Size of the largest file whose content is checked at the start of a run. Of larger files only the size is."""

CHUNK = 2**24
"""Bytes read and hashed at once."""


@dataclass(frozen=True)
class StoredFile:
    """Size of a file when it was written, and its 128-bit XXH3 hash in hexadecimal."""

    bytes: int
    hash: str


def hash_file(path: Path) -> StoredFile:
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            size += len(chunk)
    return StoredFile(size, state.hexdigest())


def hash_values(values: Any) -> str:
    """Hashes JSON values, independent of key order."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def inner_name(name: str) -> str:
    """Returns a file name if it stays within its folder. Raises ValueError otherwise."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not a name within the folder")
    return name


def write_manifest(folder: Path, known: Mapping[str, StoredFile] | None = None) -> None:
    """Writes the manifest of all files in a folder, once they are written. Files in `known` are not read again."""
    files = dict(known or {})
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.name not in files and path.name != MANIFEST:
            files[path.name] = hash_file(path)
    values = {name: asdict(files[name]) for name in sorted(files)}
    (folder / MANIFEST).write_text(json.dumps({"files": values, "hash": hash_values(values)}, indent=1))


def read_manifest(folder: Path) -> dict[str, StoredFile]:
    """Reads a folder's manifest.

    Raises:
        InputError: there is no manifest, or it is damaged.
    """
    file = folder / MANIFEST
    try:
        values = json.loads(file.read_text())
        if values["hash"] != hash_values(values["files"]):
            raise ValueError("hash mismatch")
        return {inner_name(name): StoredFile(**stored) for name, stored in values["files"].items()}
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no {MANIFEST} to compare the files with: only folders written by a run or export have one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: damaged ({type(error).__name__}: {error}): copy the folder again or, if its other files are "
            "right, remove this one"
        ) from None


def check_exported(folder: Path, *, whole: bool) -> dict[str, StoredFile]:
    """Compares the files of an exported folder with its manifest, and returns those it names. Without a manifest,
    returns none unless `whole`.

    Args:
        whole: also checks the content of large files, not only their size.

    Raises:
        InputError: a file is missing or differs, or `whole` and there is no manifest.
    """
    if not whole and not (folder / MANIFEST).is_file():
        return {}
    files = read_manifest(folder)
    problem = first_difference(folder, files, files, HASHED_AT_START if not whole else None)
    if problem is not None:
        raise InputError(
            f"{folder / problem[0]}: {problem[1]}: copy it again or, if the change is intended, remove {MANIFEST}, "
            "which lists the files as written"
        )
    return files


def first_difference(
    folder: Path, files: Mapping[str, StoredFile], names: Iterable[str], largest: int | None = None
) -> tuple[str, str] | None:
    """Returns the first of the named files that is missing or differs, and what is wrong; None if all match.

    Args:
        largest: size of the largest file whose content is compared; None for all.
    """
    for name in names:
        path, written = folder / name, files[name]
        if not path.is_file():
            return name, "is missing"
        size = path.stat().st_size
        if size != written.bytes:
            return name, f"has {size} bytes but was written with {written.bytes}"
        if (largest is None or size <= largest) and hash_file(path).hash != written.hash:
            return name, "differs from what was written (hash mismatch)"
    return None
