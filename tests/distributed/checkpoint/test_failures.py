"""What cannot be written or read costs a checkpoint, not the training, and never the checkpoints before."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from automodel_rl.checkpoint import storage
from automodel_rl.checkpoint.folder import FORMAT, MARKER, check_files, read_marker
from automodel_rl.cli import main
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.trainers.run import Run
from tests.distributed.trainers.runs import Settings, assert_same_weights, metrics_of, settings_of, train, write
from tests.rank_pool import RankPool
from tests.unit.checkpoint.test_folder import change_marker


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> Settings:
    changes: Settings = {"length": {"steps": 4}, "checkpoint": {"every_steps": 1, "keep_last": 2}}
    settings = settings_of("sft", workspace, tmp_path / "run", **changes)
    settings["observe"] = {"samples": 0}
    return settings


def steps_kept(output: Path) -> list[str]:
    """Whole checkpoints; anything else among them is an error."""
    folders = sorted(path for path in (output / "checkpoints").iterdir())
    for folder in folders:
        marker = read_marker(folder)
        check_files(folder, marker, marker.files)
    return [folder.name for folder in folders]


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    """A disk of so many bytes, where one may be mounted."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_leaves_training_and_older_checkpoints_intact(
    config: Settings, tmp_path: Path, in_background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config["checkpoint"]["async"] = in_background
    assert main(["sft", write(config, tmp_path)]) == 0
    one = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoints" / "step_4").rglob("*"))
    report = (tmp_path / "run" / "report.html").stat().st_size
    capsys.readouterr()
    with small_disk(tmp_path / "disk", int(1.8 * one) + report):
        small = config | {"output": str(tmp_path / "disk" / "run")}
        assert main(["sft", write(small, tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert steps_kept(tmp_path / "disk" / "run") == ["step_1"]
        assert_same_weights(tmp_path / "run" / "final", tmp_path / "disk" / "run" / "final")
    assert shown.count("warning: a checkpoint could not be written (No space left on device") == 3
    assert [microbatch["step"] for microbatch in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("one_rank")
def test_a_folder_that_becomes_read_only_leaves_training_intact(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, create = tmp_path / "run" / "checkpoints", RunDirectory.create

    def create_read_only(directory: RunDirectory, total_steps: int) -> None:
        create(directory, total_steps)
        subprocess.run(["mount", "--bind", "-o", "ro", str(tmp_path / "disk"), str(checkpoints)], check=True)

    with small_disk(tmp_path / "disk", 2**26):
        try:
            with mock.patch.object(RunDirectory, "create", create_read_only):
                train(config)
        finally:
            subprocess.run(["umount", "-l", str(checkpoints)], check=True)
    assert capsys.readouterr().out.count("a checkpoint could not be written (Read-only file system") == 4
    assert [microbatch["step"] for microbatch in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def full_on_one_rank(config: Settings, steps: tuple[int, ...]) -> list[str]:
    """A run in which rank 1 cannot write the tensors of some steps."""
    told: list[str] = []
    real, calls = storage._write_file, 0

    def write_file(path: Path, tensors: list) -> object:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls in steps:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device", str(path))
        return real(path, tensors)

    with (
        mock.patch.object(storage, "_write_file", write_file),
        mock.patch.object(Run, "say", lambda _, text: told.append(text)),
    ):
        train(config)
    return told


@pytest.mark.parametrize(
    ("steps", "in_background", "kept"),
    [((2, 3), True, ["step_1", "step_4"]), ((1, 2, 3), True, ["step_4"]), ((1,), False, ["step_3", "step_4"])],
    ids=str,
)
def test_one_rank_that_cannot_write_is_known_to_the_program(
    ranks: RankPool, config: Settings, tmp_path: Path, steps: tuple[int, ...], in_background: bool, kept: list[str]
) -> None:
    """The first checkpoint that a process writes is planned by DCP, whose error is no `Exception`."""
    config["parallel"] = {"pp": 2}
    config["checkpoint"] |= {"async": in_background, "load_best": True}
    config["length"]["validate_every"] = 1
    told, nothing = ranks(2).run(full_on_one_rank, config, steps)
    assert sum("could not be written (No space left on device: " in line for line in told) == len(steps)
    assert not nothing
    assert steps_kept(tmp_path / "run") == kept
    assert (tmp_path / "run" / "final").is_dir()


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / "step_4"


def flip_byte(folder: Path) -> None:
    (file,) = (newest(folder) / "tensors").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, "rank_00000.safetensors: differs from what was written"),
        (
            lambda folder: (newest(folder) / "tensors" / "rank_00000.safetensors").unlink(),
            "tensors/rank_00000.safetensors: is missing",
        ),
        (lambda folder: change_marker(newest(folder), format=FORMAT + 1), f"has checkpoint format {FORMAT + 1}"),
        (lambda folder: (newest(folder) / MARKER).unlink(), f"no {MARKER}, so it is not a complete checkpoint"),
    ],
    ids=["flipped byte", "missing shard", "newer format", "no marker"],
)
def test_auto_goes_back_to_the_checkpoint_before_a_damaged_one(
    config: Settings, tmp_path: Path, damage: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", write(config, tmp_path)]) == 0
    whole = shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "final")  # it was killed before it was finished
    damage(tmp_path / "run")
    capsys.readouterr()
    assert main(["sft", write(config, tmp_path), "--resume", str(newest(tmp_path / "run"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert main(["sft", write(config, tmp_path), "--resume", "auto"]) == 0
    shown = capsys.readouterr().out
    assert message in shown
    assert "resuming from step 3" in shown
    assert_same_weights(whole / "final", tmp_path / "run" / "final")
    assert metrics_of(whole)[-1]["train/loss"] == metrics_of(tmp_path / "run")[-1]["train/loss"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4.damaged")
    assert steps_kept(tmp_path / "run") == ["step_3", "step_4"]


@pytest.mark.usefixtures("one_rank")
def test_without_a_whole_checkpoint_nothing_is_overwritten(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["length"] = {"steps": 1}
    assert main(["sft", write(config, tmp_path)]) == 0
    shutil.rmtree(tmp_path / "run" / "final")
    (tmp_path / "run" / "checkpoints" / "step_1" / "progress.json").write_text("{}")
    assert main(["sft", write(config, tmp_path), "--resume", "auto"]) == 2
    assert "none of its 1 checkpoints is complete" in capsys.readouterr().err
