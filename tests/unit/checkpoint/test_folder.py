"""A checkpoint's folder is whole, or it is said what is wrong with it; nothing outside it is touched."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_rl.checkpoint.folder import (
    FORMAT,
    MARKER,
    Marker,
    check_files,
    is_complete,
    read_marker,
    write_hashed,
    write_marker,
)
from automodel_rl.cli import main
from automodel_rl.manifest import hash_values

NAMES = ("config.yaml", "progress.json", "tensors/index.json", "ranks/rank_0.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of small files."""
    folder = tmp_path / "step_3"
    (folder / "ranks").mkdir(parents=True)
    (folder / "tensors").mkdir()
    files = {name: write_hashed(folder / name, name * 9) for name in NAMES}
    assert not is_complete(folder)
    write_marker(folder, Marker(step=3, world_size=1, files=files))
    return folder


def change_marker(folder: Path, **values: object) -> None:
    """A marker with other values, and their hash."""
    marker = json.loads((folder / MARKER).read_text())
    del marker["hash"]
    marker |= values
    (folder / MARKER).write_text(json.dumps(marker | {"hash": hash_values(marker)}))


def edit_step(folder: Path) -> None:
    (folder / MARKER).write_text((folder / MARKER).read_text().replace('"step": 3', '"step": 4'))


def flip_byte(folder: Path) -> None:
    file = folder / "progress.json"
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)


def named_outside(name: str) -> Callable[[Path], None]:
    return lambda folder: change_marker(folder, files={name: {"bytes": 1, "hash": ""}})


def without(name: str) -> Callable[[Path], None]:
    def forget(folder: Path) -> None:
        files = json.loads((folder / MARKER).read_text())["files"]
        del files[name]
        change_marker(folder, files=files)

    return forget


def test_a_whole_checkpoint_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = read_marker(folder)
    check_files(folder, marker, marker.files)
    assert main(["verify-checkpoint", str(folder)]) == 0
    assert "intact. After step 3, written by 1 ranks, 4 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, "progress.json: differs from what was written"),
        (lambda folder: (folder / "ranks" / "rank_0.json").unlink(), "ranks/rank_0.json: is missing"),
        (lambda folder: (folder / "progress.json").write_text("short"), "has 5 bytes but was written with 117"),
        (lambda folder: (folder / MARKER).unlink(), f"no {MARKER}, so it is not a complete checkpoint"),
        (lambda folder: (folder / MARKER).write_text("{"), f"{MARKER}: cannot be read"),
        (lambda folder: (folder / MARKER).write_text("[" * 100_000), f"{MARKER}: cannot be read"),
        (lambda folder: (folder / MARKER).write_text("[]"), f"{MARKER}: damaged"),
        (
            lambda folder: change_marker(folder, format=FORMAT + 1),
            f"checkpoint format {FORMAT + 1}, but this version",
        ),
        (edit_step, f"{MARKER}: damaged (ValueError: hash mismatch, it was changed"),
        (lambda folder: change_marker(folder, format=1), "checkpoint format 1, but this version"),
        (lambda folder: change_marker(folder, files={"a": 3}), f"{MARKER}: damaged"),
        (lambda folder: change_marker(folder, files={}), "it does not name config.yaml"),
        (lambda folder: change_marker(folder, step=float("inf")), f"{MARKER}: damaged"),
        (without("ranks/rank_0.json"), "it does not name ranks/rank_0.json"),
        (named_outside("/etc/passwd"), "'/etc/passwd' is not a name within the folder"),
        (named_outside("tensors/../../../x"), "is not a name within the folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, damage: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert main(["verify-checkpoint", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
