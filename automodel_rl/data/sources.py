"""Sources of records: JSON-lines files and datasets."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from automodel_rl.config import SourceConfig
from automodel_rl.data.sampler import Draw
from automodel_rl.errors import InputError

MOST_FILES = 250_000
"""Most files that a dataset's folder may hold."""


class Source(Protocol):
    """A sequence of records, with the place of each for error messages."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def where(self, number: int) -> str:
        """A record's place, for error messages: file and line, or dataset and record."""
        ...


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
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{self.where(number)}: not valid JSON ({error})") from None
        except RecursionError:
            raise InputError(f"{self.where(number)}: not a record, for it is nested too deeply") from None
        if not isinstance(record, dict):
            raise InputError(f"{self.where(number)}: a record is a JSON object, this is {type(record).__name__}")
        return record


class HubDataset:
    """A split of a dataset that `datasets.load_dataset` opens, by its hub id or its folder."""

    def __init__(self, path: str, split: str):
        from datasets import load_dataset  # takes seconds, and only dataset ids need it

        self.name = f"{path}[{split}]"
        _refuse_crowded(Path(path))
        try:
            self.records = _with_closed_images(load_dataset(path, split=split))
        except Exception as error:  # builders raise errors of their own, of Arrow and of the hub
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: neither a .jsonl file nor a dataset with split {split!r} ({reason})") from None
        if not len(self.records):
            raise InputError(f"{self.name}: the dataset is empty")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.records[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def where(self, number: int) -> str:
        return f"{self.name}: record {number}"


class Sources:
    """Several sources. They can be pickled, so that worker processes can use them.

    Args:
        configs: configs of the sources.

    Attributes:
        sizes: number of records of each source.
        weights: weight of each source in the config, or None.

    Raises:
        InputError: a source cannot be opened, or is empty.
    """

    def __init__(self, configs: Sequence[SourceConfig]):
        self._configs, self._opened = configs, [open_source(config) for config in configs]
        self.sizes = [len(source) for source in self._opened]
        self.weights = [config.weight for config in configs]

    def find(self, draw: Draw) -> tuple[dict[str, Any], SourceConfig, str]:
        """A record, the config of its source, and its place in the data: the arguments of a `Reader`."""
        source, number = draw
        return self._opened[source][number], self._configs[source], self._opened[source].where(number)


def is_file(config: SourceConfig) -> bool:
    return config.path.endswith((".jsonl", ".json")) or Path(config.path).is_file()


def open_source(config: SourceConfig) -> Source:
    """Opens a source without reading its records."""
    return JsonLines(Path(config.path)) if is_file(config) else HubDataset(config.path, config.split)


def _refuse_crowded(folder: Path) -> None:
    """Raises InputError for a folder with very many files, such as `/`: `datasets` would search it for hours."""
    files = (name for _, _, names in os.walk(folder) for name in names)
    if next(itertools.islice(files, MOST_FILES, None), None) is not None:
        raise InputError(
            f"{folder}: holds more than {MOST_FILES:,} files: give the folder of a dataset, or a .jsonl file"
        )


def _with_closed_images(records: Any) -> Any:
    """The dataset with images as bytes or paths. Images are opened only on the ranks that encode them."""
    from datasets import Image, List

    for name, feature in records.features.items():
        if isinstance(feature, Image):
            records = records.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            records = records.cast_column(name, List(Image(decode=False)))
    return records
