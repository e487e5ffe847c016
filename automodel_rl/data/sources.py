"""Record sources: files of all common formats, glob patterns, and datasets."""

import bisect
import contextlib
import glob
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from automodel_rl.config import SourceConfig
from automodel_rl.data.json_files import COMPRESSED, open_json
from automodel_rl.data.sampler import Draw
from automodel_rl.data.tables import Table
from automodel_rl.errors import InputError

BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""Builders of the datasets library by file suffix."""

SEPARATORS = {".csv": ",", ".tsv": "\t"}

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
ENDINGS = (*JSON_ENDINGS, *BUILDERS, *SEPARATORS)
"""Suffixes of data files; one of `COMPRESSED` may follow."""

MAX_FILES = 20_000
"""Maximum files in a dataset's folder. `datasets` walks the folder dozens of times, at about 20 us per file."""


class RecordSource(Protocol):
    """A sequence of records."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def where(self, number: int) -> str:
        """Returns a record's location for error messages: file and line, or dataset and record."""
        ...


class ArrowRecords:
    """A dataset of the datasets library. `name` is used in error messages."""

    def __init__(self, records: Any, name: str):
        self.records, self.name = _with_closed_files(records), name
        if not len(records):
            raise InputError(f"{name}: the dataset is empty")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.records[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def where(self, number: int) -> str:
        return f"{self.name}: record {number}"


class Joined:
    """A concatenation of several sources."""

    def __init__(self, sources: Sequence[RecordSource]):
        self.sources = sources
        self.starts = [0, *itertools.accumulate(len(source) for source in sources)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        place, source = self._find(number)
        return source[place]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(self.sources)

    def where(self, number: int) -> str:
        place, source = self._find(number)
        return source.where(place)

    def _find(self, number: int) -> tuple[int, RecordSource]:
        which = bisect.bisect_right(self.starts, number) - 1
        return number - self.starts[which], self.sources[which]


class Sources:
    """Several sources. Picklable. `open_one` opens a source, by default `open_source`.

    Attributes:
        sizes: number of records of each source.
        weights: configured weight of each source, or None.
    """

    def __init__(self, configs: Sequence[SourceConfig], open_one: Callable[[SourceConfig], RecordSource] | None = None):
        self._configs, self._opened = configs, [(open_one or open_source)(config) for config in configs]
        self.sizes = [len(source) for source in self._opened]
        self.weights = [config.weight for config in configs]

    def find(self, draw: Draw) -> tuple[dict[str, Any], SourceConfig, str]:
        """Returns a record, the config of its source, and its location in the data: the arguments of a `Reader`."""
        source, number = draw
        return self._opened[source][number], self._configs[source], self._opened[source].where(number)


def is_local(config: SourceConfig) -> bool:
    """Whether a source is on this machine, so that it opens without the hub."""
    return glob.has_magic(config.path) or Path(config.path).exists()


def open_source(config: SourceConfig) -> RecordSource:
    """Opens a source. JSON lines are only indexed."""
    if glob.has_magic(config.path) and not os.path.exists(config.path):
        paths = sorted(path for path in glob.glob(config.path, recursive=True) if os.path.isfile(path))
        if not paths:
            raise InputError(f"{config.path}: no file matches this pattern")
        return Joined([_open_file(Path(path)) for path in paths])
    path = Path(config.path)
    if path.is_file() or ending_of(path) in ENDINGS:
        return _open_file(path)
    return _open_dataset(path, config)


def ending_of(path: Path) -> str:
    """Returns the suffix that determines a file's format, in lower case, without that of a compression."""
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    return endings[-1] if endings else ""


def _open_file(path: Path) -> RecordSource:
    ending = ending_of(path)
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        raise InputError(f"{path}: cannot read the data file (No such file or directory{where})")
    if ending in SEPARATORS:
        return Table(path, SEPARATORS[ending])
    if ending not in BUILDERS:
        return open_json(path)
    from datasets import load_dataset  # takes seconds to import, and only some sources need it

    if ending == ".parquet" and path.suffix.lower() == ending and (readable := _readable_columns(path)):
        return _opened(path, lambda: _without_other_columns(path, readable), str(path))
    return _opened(path, lambda: load_dataset(BUILDERS[ending], data_files=str(path), split="train"), str(path))


def _readable_columns(path: Path) -> list[str]:
    """Returns the columns of a parquet file that `datasets` supports if it has others, such as maps; otherwise []."""
    import pyarrow  # starts a thread, and only some sources need it
    from datasets import Features
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (OSError, ValueError):  # a damaged file: opening it will raise
        return []
    readable = []
    for column in schema:
        with contextlib.suppress(ValueError):
            Features.from_arrow_schema(pyarrow.schema([column]))
            readable.append(column.name)
    return readable if len(readable) < len(schema) else []


def _without_other_columns(path: Path, readable: list[str]) -> Any:
    """Loads some columns of a parquet file into memory."""
    from datasets import Dataset
    from pyarrow import parquet

    return Dataset(parquet.read_table(path, columns=readable))


def _open_dataset(path: Path, config: SourceConfig) -> RecordSource:
    """Opens a dataset by hub id, by folder, or from a folder of `save_to_disk`."""
    from datasets import load_dataset, load_from_disk

    _refuse_crowded(path)
    _refuse_tables(path)
    if config.split != "train" and (path / "state.json").is_file():
        raise InputError(f"{path}: is one dataset without splits, so split={config.split} is invalid: remove it")
    split, name = config.split, f"{config.path}[{config.split}]"
    if (path / "state.json").is_file():
        return _opened(path, lambda: load_from_disk(str(path)), str(path))
    if (path / "dataset_dict.json").is_file():
        return _opened(path, lambda: load_from_disk(str(path))[split], name)
    return _opened(path, lambda: load_dataset(config.path, config.subset, split=split), name)


def _opened(path: Path, load: Any, name: str) -> ArrowRecords:
    try:
        return ArrowRecords(load(), name)
    except InputError:
        raise
    except Exception as error:  # builders raise their own errors, Arrow's and the hub's
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        if path.is_file():
            raise InputError(
                f"{path}: cannot read the data file ({type(error).__name__}: {reason}): use an intact one"
            ) from None
        raise InputError(
            f"{name}: neither a data file nor a dataset with this split ({reason}): set the path of one"
        ) from None


def _refuse_crowded(folder: Path) -> None:
    """Raises InputError for a folder with very many files, such as `/`, which `datasets` would search for hours."""
    files = (name for _, folders, names in os.walk(folder) for name in (*folders, *names))
    if next(itertools.islice(files, MAX_FILES, None), None) is not None:
        raise InputError(
            f"{folder}: holds more than {MAX_FILES:,} files: set a pattern for its data files, such as "
            f"{folder}/**/*.parquet, or the folder of a dataset"
        )


def _refuse_tables(folder: Path) -> None:
    """Raises InputError for a folder with CSV or TSV files, since `datasets` would convert values such as 042 and
    NA."""
    tables = (path for path in folder.rglob("*") if ending_of(path) in SEPARATORS)
    table = next(tables, None) if folder.is_dir() else None
    if table is not None:
        raise InputError(
            f"{folder}: has tables such as {table.name}, whose values must stay text: name the files themselves, as in "
            f"{folder}/*{table.suffix}"
        )


def _with_closed_files(records: Any) -> Any:
    """Returns the dataset with images and audio as bytes or paths. They are decoded only on the ranks that encode
    them."""
    from datasets import Audio, Image, List

    for name, feature in records.features.items():
        for kind in (Image, Audio):
            if isinstance(feature, kind):
                records = records.cast_column(name, kind(decode=False))
            elif isinstance(feature, List) and isinstance(feature.feature, kind):
                records = records.cast_column(name, List(kind(decode=False)))
    return records
