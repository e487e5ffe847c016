"""JSON files as sources of records: JSON lines, and JSON arrays. Records stay as they were written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from automodel_rl.errors import InputError

WHOLE = 2**20
"""Number of bytes in which the first character of a file that is not blank must be."""


def open_json(path: Path) -> "JsonLines | JsonArray":
    """Opens a file that holds an array or lines, whatever its name says.

    Raises:
        InputError: the file cannot be read, or is empty or no JSON.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(WHOLE).lstrip()[:1]
    except OSError as error:
        raise InputError(f"{path}: cannot read the data file ({error.strerror})") from None
    return JsonArray(path) if begins == b"[" else JsonLines(path)


class JsonLines:
    """A JSON-lines file. Only the places of its lines are kept in memory. A record is read when it is needed."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                lines = [(len(line), not line.isspace()) for line in file]
        except OSError as error:
            raise InputError(f"{path}: cannot read the data file ({error.strerror})") from None
        lengths, filled = np.array(lines, dtype=np.int64).reshape(-1, 2).T
        self.lines = np.flatnonzero(filled)
        self.starts = (lengths.cumsum() - lengths)[self.lines]
        if not len(self.lines):
            raise InputError(f"{path}: the data file is empty; it needs one JSON object a line")

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.starts[number])
            return self._parse(file.readline(), number)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            for number, start in enumerate(self.starts):
                file.seek(start)
                yield self._parse(file.readline(), number)

    def where(self, number: int) -> str:
        return f"{self.path}:{self.lines[number] + 1}"

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        return _checked(_parsed(line, self.where(number)), self.where(number))


class JsonArray:
    """A file with one JSON array of records. All of them are kept in memory."""

    def __init__(self, path: Path):
        self.path = path
        self.records = _parsed(path.read_bytes(), str(path))
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
        raise InputError(f"{where}: not valid JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{where}: not a record, for it is nested too deeply") from None


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InputError(f"{where}: a record is a JSON object, this is {type(record).__name__}")
    return record
