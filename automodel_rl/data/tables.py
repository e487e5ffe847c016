"""CSV and TSV files as record sources. All values stay strings: an answer of 042 is not a number, and NA is not
missing."""

import csv
from collections.abc import Iterator
from pathlib import Path

import fsspec

from automodel_rl.errors import InputError

LONGEST_VALUE = 2**30
"""Maximum characters of a value; Python's own limit is 131,072."""


class Table:
    """A table, kept in memory. The first row of the file, which may be compressed, holds the column names."""

    def __init__(self, path: Path, separator: str):
        self.path, self.separator, start = path, separator, 1
        csv.field_size_limit(LONGEST_VALUE)
        self.lines: list[int] = []
        self.rows: list[list[str]] = []
        try:
            with fsspec.open(str(path), "rt", encoding="utf-8-sig", newline="", compression="infer") as file:
                reader = csv.reader(file, delimiter=separator, strict=True)
                self.columns = next(reader, [])
                start = reader.line_num + 1
                for row in reader:
                    if row:
                        self._add(row, start)
                    start = reader.line_num + 1
        except (OSError, EOFError, ValueError, csv.Error) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{path}:{start}: cannot read the data file from this row on ({reason}): use a CSV or TSV file in "
                "UTF-8, where values that begin with a quote end with one and other quotes in them are doubled"
            ) from None
        if not self.rows:
            raise InputError(f"{path}: the data file is empty; it needs a row of names and rows of values")

    def _add(self, row: list[str], line: int) -> None:
        if len(row) != len(self.columns):
            raise InputError(
                f"{self.path}:{line}: the row has {len(row)} values, but the header has {len(self.columns)} names: "
                "quote values with separators"
            )
        if self.separator == "\t" and any("\t" in value and "\n" in value for value in row):
            raise InputError(
                f"{self.path}:{line}: a value that begins with a quote extends over the rows that follow: quote values "
                'that begin with a quote, with their own quotes doubled, as in """Hi"" she said"'
            )
        self.lines.append(line)
        self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, str]:
        return dict(zip(self.columns, self.rows[number], strict=True))

    def __iter__(self) -> Iterator[dict[str, str]]:
        return (self[number] for number in range(len(self)))

    def where(self, number: int) -> str:
        return f"{self.path}:{self.lines[number]}"
