"""JSON lines and JSON arrays as record sources. Records are not converted."""

import hashlib
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import zstandard

from automodel_rl.errors import InputError

BOM = b"\xef\xbb\xbf"

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes of compressed files."""

WHOLE = 2**20
"""Number of leading bytes within which a file must have a non-blank character."""


def open_json(path: Path) -> "JsonLines | JsonArray":
    """Opens a file of JSON lines or of a JSON array, distinguished by content rather than by name."""
    try:
        file = _plain(path)
        with file.open("rb") as opened:
            begins = opened.read(WHOLE).removeprefix(BOM).lstrip()[:1]
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot read the data file ({reason}): use an intact file") from None
    return JsonArray(path, file) if begins == b"[" else JsonLines(path, file)


def _plain(path: Path) -> Path:
    """Returns the file itself, or a decompressed copy in the user's cache, shared with other ranks and runs."""
    if path.suffix.lower() not in COMPRESSED:
        return path
    about = path.stat()
    name = hashlib.sha256(f"{path.absolute()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automodel_rl"
    plain = cache / f"{name}.json"
    if not plain.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = cache / f".{name}.{os.getpid()}"
        try:
            with fsspec.open(str(path), "rb", compression="infer") as source, unfinished.open("wb") as target:
                shutil.copyfileobj(source, target)
            unfinished.rename(plain)
        finally:
            unfinished.unlink(missing_ok=True)
    return plain


class JsonLines:
    """A JSON-lines file. Only line offsets are kept in memory; records are parsed on access. `plain` is `path` without
    compression."""

    def __init__(self, path: Path, plain: Path):
        self.path, self.plain = path, plain
        with plain.open("rb") as file:
            lines = [(len(line), not line.isspace()) for line in file]
        lengths, filled = np.array(lines, dtype=np.int64).reshape(-1, 2).T
        self.lines = np.flatnonzero(filled)
        self.starts = (lengths.cumsum() - lengths)[self.lines]
        if not len(self.lines):
            raise InputError(f"{path}: the data file is empty; it needs one JSON object a line")

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> dict[str, Any]:
        with self.plain.open("rb") as file:
            file.seek(self.starts[number])
            return self._parse(file.readline(), number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.plain.open("rb") as file:
            for number, start in enumerate(self.starts):
                file.seek(start)
                yield self._parse(file.readline(), number)

    def where(self, number: int) -> str:
        return f"{self.path}:{self.lines[number] + 1}"

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        return _checked(_parsed(line, self.where(number)), self.where(number))


class JsonArray:
    """A file with one JSON array of records, all kept in memory. `plain` is `path` without compression."""

    def __init__(self, path: Path, plain: Path):
        self.path = path
        self.records = _parsed(plain.read_bytes().removeprefix(BOM), str(path))
        if not self.records:
            raise InputError(f"{path}: the data file is empty; it needs an array of JSON objects")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return _checked(self.records[number], self.where(number))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def where(self, number: int) -> str:
        return f"{self.path}: record {number}"


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{where}: not valid JSON ({error}): use one JSON object a line, or an array of them"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: not a record, because it is nested too deeply") from None


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InputError(f"{where}: a record must be a JSON object with columns, not {type(record).__name__}")
    return record
