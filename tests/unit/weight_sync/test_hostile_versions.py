"""Published weights in a folder that others may write to: what a stranger's version can do to a reader."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.published import HashedFile, PublishedWeights, _hash_values, folder_of
from automodel_rl.weight_sync.version_files import VERSION_FILE, VersionFiles, numbers_in, write_newest

WEIGHT = torch.arange(8, dtype=torch.bfloat16)


def version(folder: Path, tensors: Any = None, header: Any = None, content: bytes | None = None, **values: Any) -> None:
    """A version whose hashes are right, with anything in it."""
    place = folder_of(folder, 1)
    place.mkdir(parents=True)
    file = HashedFile(place / "sender_0.bin")
    packed = (
        zstandard.ZstdCompressor().compress(WEIGHT.view(torch.int16).numpy().tobytes()) if content is None else content
    )
    block = {"whole": True, "dtype": "bfloat16", "chunks": [["weight", 0, 8]], "bytes": len(packed)}
    line = header if isinstance(header, bytes) else json.dumps(block | (header or {})).encode()
    file.write(line + b"\n" + packed)
    described = {"weight": [[8], "bfloat16", int(checksum(WEIGHT))]} if tensors is None else tensors
    whole = {"format": 2, "version": 1, "before": None, "tensors": described, "changed": 0}
    whole |= {"files": {"sender_0.bin": file.finish()}} | values
    (place / VERSION_FILE).write_text(json.dumps(whole | {"hash": _hash_values(whole), "signature": None}))
    write_newest(folder, 1)


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        PublishedWeights(folder).load_version({})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_version_that_is_right_is_read(tmp_path: Path) -> None:
    version(tmp_path)
    tensors = dict[str, Tensor]()
    assert PublishedWeights(tmp_path).load_version(tensors) == 1
    assert torch.equal(tensors["weight"], WEIGHT)


@pytest.mark.parametrize(
    "tensor",
    [
        [[8], "os", 0],
        [[8], "nn", 0],
        [[8], 3, 0],
        [[10**15], "bfloat16", 0],
        [[2**40, 2**40], "bfloat16", 0],
        [[-1], "bfloat16", 0],
        [[0, 2**47, 2**47], "bfloat16", 0],
        [["8"], "bfloat16", 0],
        ["8", "bfloat16", 0],
        [[8.5], "bfloat16", 0],
        [8, "bfloat16", 0],
        [[8], "bfloat16", "x"],
        [[8], "bfloat16", 1e400],
        [[8]],
        None,
    ],
    ids=str,
)
def test_tensors_that_cannot_be_are_refused(tmp_path: Path, tensor: Any) -> None:
    version(tmp_path, {"weight": tensor})
    assert "is not a published version" in refusal(tmp_path)


@pytest.mark.parametrize(
    "write",
    [
        lambda file: file.write_text("[" * 200_000),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text("3"),
        lambda file: file.write_bytes(b"\xff\xfe"),
        lambda file: file.write_text('{"hash": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    ],
)
def test_descriptions_that_are_none_are_refused(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    version(tmp_path)
    write(folder_of(tmp_path, 1) / VERSION_FILE)
    assert "is not a published version" in refusal(tmp_path)


def test_a_description_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    version(tmp_path)
    with (folder_of(tmp_path, 1) / VERSION_FILE).open("r+b") as file:
        file.truncate(2**33)
    assert "more than the limit of 268,435,456" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "content"),
    [
        ({}, b"no zstd"),
        ({"bytes": 2**62}, None),
        ({"bytes": -1}, None),
        ({"bytes": "9"}, None),
        ({"dtype": "float32"}, None),
        ({"dtype": "os"}, None),
        ({"chunks": [["weight", 0, 9]]}, None),
        ({"chunks": [["weight", -4, 8]]}, None),
        ({"chunks": [["weight", 8, -8]]}, None),
        ({"chunks": [["weight", 2**70, 8]]}, None),
        ({"chunks": [["another", 0, 8]]}, None),
        ({"chunks": [["weight", 0, 8]] * 1000}, None),
        ({"chunks": "weight"}, None),
        ({"whole": False}, None),
        (b"[" * 200_000, None),
        (b"[]", None),
        (b"\xff", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_blocks_that_cannot_be_are_refused(tmp_path: Path, header: Any, content: bytes | None) -> None:
    version(tmp_path, header=header, content=content)
    assert "is not a file of a published version" in refusal(tmp_path)


@pytest.mark.parametrize("says_size", [True, False])
def test_what_unpacks_to_more_than_is_due_is_not_unpacked(tmp_path: Path, says_size: bool) -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=says_size).compress(bytes(2**31))
    assert len(bomb) < 2**17
    version(tmp_path, content=bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "is not a file of a published version" in refusal(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    version(tmp_path)
    file = folder_of(tmp_path, 1) / "sender_0.bin"
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in refusal(tmp_path)


def test_a_version_that_changes_what_is_not_there_is_refused(tmp_path: Path) -> None:
    version(tmp_path)
    tensors = dict[str, Tensor]()
    weights = PublishedWeights(tmp_path)
    weights.load_version(tensors)
    assert weights.version is not None
    second = tmp_path / "00000002"
    second.mkdir()
    described = {"weight": [[8], "bfloat16", int(checksum(WEIGHT))], "new": [[8], "bfloat16", 0]}
    whole = {
        "format": 2,
        "version": 2,
        "before": [1, weights.version.hash],
        "tensors": described,
        "changed": 0,
        "files": {},
    }
    (second / VERSION_FILE).write_text(json.dumps(whole | {"hash": _hash_values(whole), "signature": None}))
    with pytest.raises(InputError, match="changes tensors that the previous version lacks, the first new"):
        weights.load_version(tensors)


@pytest.mark.parametrize("name", ["²²²²²²²²", "٠٠٠٠٠٠٠١", "1", "00000001x", "-0000001"])
def test_folders_with_other_names_are_no_versions(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / VERSION_FILE).write_text("{}")
    assert numbers_in(tmp_path) == []


@pytest.mark.parametrize("content", ['{"version": 1e400}', "[" * 200_000, "[]", '{"version": "x"}', ""])
def test_a_newest_file_that_names_no_version_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "newest.json").write_text(content)
    elsewhere = VersionFiles(f"simplecache::file://{tmp_path}")
    with pytest.raises(InputError, match="contains no version"):
        elsewhere.newest()


def test_deltas_of_other_sizes_are_refused(tmp_path: Path) -> None:
    mask = np.full(1, 255, np.uint8).tobytes()
    packed = zstandard.ZstdCompressor().compress(mask + bytes(4))
    version(tmp_path, header={"whole": False, "bytes": len(packed)}, content=packed)
    assert "is not a file of a published version" in refusal(tmp_path)
