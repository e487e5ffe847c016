"""Every kind of data file and dataset gives the same records."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import zstandard
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from automodel_rl.config import SourceConfig
from automodel_rl.data.sources import open_source
from automodel_rl.errors import InputError

RECORDS = [{"prompt": f"ä{number}", "answer": f"0{number}", "note": ""} for number in range(5)]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()

TABLE = "\n".join(["prompt,answer,note", *(",".join(record.values()) for record in RECORDS)]).encode()

Write = Callable[[Path], object]
FILES: dict[str, Write] = {
    "d.jsonl": lambda path: path.write_bytes(LINES),
    "d.json": lambda path: path.write_text(json.dumps(RECORDS, indent=1)),
    "lines.json": lambda path: path.write_bytes(LINES),
    "no_ending": lambda path: path.write_bytes(LINES),
    "d.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "d.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "d.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "d.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "d.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "d.parquet": lambda path: Dataset.from_list(RECORDS).to_parquet(str(path)),
    "D.PARQUET": lambda path: Dataset.from_list(RECORDS).to_parquet(str(path)),
    "d.csv": lambda path: Dataset.from_list(RECORDS).to_csv(str(path)),
    "d.tsv": lambda path: Dataset.from_list(RECORDS).to_csv(str(path), sep="\t"),
    "d.csv.gz": lambda path: path.write_bytes(gzip.compress(TABLE)),
    "d.arrow": lambda path: _arrow(path),
    "saved": lambda path: Dataset.from_list(RECORDS).save_to_disk(str(path)),
    "saved_splits": lambda path: DatasetDict({"train": Dataset.from_list(RECORDS)}).save_to_disk(str(path)),
}


def _arrow(path: Path) -> None:
    Dataset.from_list(RECORDS).save_to_disk(str(path.parent / "whole"))
    next((path.parent / "whole").glob("*.arrow")).rename(path)


@pytest.mark.parametrize("rows", ['"a\tb\nc\td\n"e\tf\n', 'c\td\n"a\tb\n', '"a\tb\nc"\td\n'])
def test_a_quote_at_the_begin_of_a_value_takes_in_no_other_rows(tmp_path: Path, rows: str) -> None:
    (tmp_path / "d.tsv").write_text("prompt\tanswer\n" + rows)
    with pytest.raises(InputError, match=r"d.tsv:[23]: .*quote"):
        open_source(SourceConfig(path=str(tmp_path / "d.tsv")))


def test_a_column_that_datasets_does_not_read_does_not_refuse_a_parquet_file(tmp_path: Path) -> None:
    text = pyarrow.string()
    columns = {"prompt": ["a", "b"], "meta": pyarrow.array([[("k", "v")]] * 2, pyarrow.map_(text, text))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "d.parquet")
    assert [*open_source(SourceConfig(path=str(tmp_path / "d.parquet")))] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("name", FILES)
def test_a_format_gives_the_records_as_they_were_written(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    source = open_source(SourceConfig(path=str(tmp_path / name)))
    assert len(source) == len(RECORDS)
    assert [dict(record) for record in source] == RECORDS
    assert source[3] == RECORDS[3]
    assert name in source.where(3)


def test_a_pattern_joins_files_of_any_format_in_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("d.jsonl", "d.json", "d.parquet"):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True)
        FILES[name](tmp_path / "data" / name)
    config = SourceConfig(path="~/data/d.*")
    source = open_source(config)
    assert [*source] == 3 * RECORDS
    assert [source[number] for number in (0, 7, 14)] == [RECORDS[0], RECORDS[2], RECORDS[4]]
    assert source.where(0) == f"{tmp_path}/data/d.json: record 0"
    assert source.where(7) == f"{tmp_path}/data/d.jsonl:3"
    assert source.where(14) == f"{tmp_path}/data/d.parquet: record 4"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.parquet", b"PAR1", "d.parquet: cannot read the data file"),
        ("d.jsonl.gz", b"no gzip", "d.jsonl.gz: cannot read the data file"),
        ("d.csv", b"", "d.csv: the data file is empty"),
        ("d.csv", b"a,b\n", "d.csv: the data file is empty"),
        ("*.csv", None, "no file matches this pattern"),
        ("none.parquet", None, "none.parquet: cannot read the data file .No such file or directory"),
        ("none.jsonl.zst", None, "none.jsonl.zst: cannot read the data file .No such file or directory"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_source(SourceConfig(path=str(tmp_path / name)))


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    FILES["saved_splits"](tmp_path / "d")
    with pytest.raises(InputError, match=r"d\[test\]: neither a data file nor a dataset with this split"):
        open_source(SourceConfig(path=str(tmp_path / "d"), split="test"))
