"""Files and folders are complete or not there."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from automodel_rl.errors import InputError
from automodel_rl.files import (
    SETTLED_SECONDS,
    TEMPORARY_PREFIX,
    TemporaryFolder,
    _remove_abandoned,
    as_input_error,
    atomic_folder,
    check_writable,
    new_folder,
    write_atomic,
    write_private,
)
from automodel_rl.launch.process_group import join_process_group, leave_process_group


def test_a_text_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_atomic(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def fail_half_way(folder: Path, group: dist.ProcessGroup) -> None:
    with atomic_folder(folder, group) as unfinished:
        (unfinished / "weights").write_text("ne")
        raise OSError("disk is full")


def test_a_folder_keeps_what_it_had_until_the_new_one_is_complete(tmp_path: Path) -> None:
    join_process_group(1)
    group = dist.group.WORLD
    try:
        with atomic_folder(tmp_path / "final", group) as unfinished:
            (unfinished / "weights").write_text("old")
        with pytest.raises(OSError, match="disk is full"):
            fail_half_way(tmp_path / "final", group)
        assert (tmp_path / "final" / "weights").read_text() == "old"
        with atomic_folder(tmp_path / "final", group) as unfinished:
            assert not any(unfinished.iterdir())
            (unfinished / "weights").write_text("new")
        assert (tmp_path / "final" / "weights").read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["final"]
    finally:
        leave_process_group()


def test_a_new_folder_is_complete_or_leaves_nothing(tmp_path: Path) -> None:
    with new_folder(tmp_path / "above" / "new") as unfinished:
        (unfinished / "a").write_text("a")
        assert not (tmp_path / "above" / "new").exists()
    assert (tmp_path / "above" / "new" / "a").read_text() == "a"
    with pytest.raises(InputError, match="new: already exists"), new_folder(tmp_path / "above" / "new"):
        pass
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other") as unfinished:
        (unfinished / "a").write_text(str(1 / 0))
    assert [path.name for path in tmp_path.iterdir()] == ["above"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x/a"), Exception("No space left on device (os error 28)")],
    ids=["python", "rust"],
)
def test_what_the_disk_refuses_is_one_line(tmp_path: Path, error: Exception) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "new") as unfinished:
            (unfinished / "a").write_text("half")
            raise error

    with pytest.raises(InputError, match=r"new: cannot be written \(No space left on device.*: make room, or choose"):
        fill()
    assert not [*tmp_path.iterdir()]
    with pytest.raises(KeyError), as_input_error("x"):
        raise KeyError("a bug")


@pytest.mark.parametrize("place", ["file/below", "file", "/proc/version/below"])
def test_a_place_below_a_file_is_no_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="^--out x: .*(file|version) is not a writable folder: choose another$"):
        check_writable(tmp_path / place, "--out x")
    check_writable(tmp_path / "not" / "there", "--out x")


def test_a_file_for_its_owner_alone_is_whole_and_replaces_only_what_it_may(tmp_path: Path) -> None:
    file = tmp_path / "new" / "key"
    write_private(file, "first")
    write_private(file, "second")
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(file, "third", replaces=False)
    assert [path.name for path in file.parent.iterdir()] == ["key"]
    assert file.read_text() == "second"


def test_temporary_folders_of_killed_processes_are_removed_with_the_next_one(tmp_path: Path) -> None:
    long_ago = time.time() - 2 * SETTLED_SECONDS
    abandoned, begun, linked = (tmp_path / f"{TEMPORARY_PREFIX}{name}" for name in ("abandoned", "begun", "linked"))
    abandoned.mkdir()
    (abandoned / "file").write_text("left")
    begun.mkdir()
    (tmp_path / "of others").mkdir()
    linked.symlink_to(tmp_path / "of others")
    with TemporaryFolder(tmp_path) as used:
        for folder in (abandoned, Path(used), tmp_path / "of others"):
            os.utime(folder, (long_ago, long_ago))
        _remove_abandoned.cache_clear()  # as in another process
        with TemporaryFolder(tmp_path) as next_one:
            assert not abandoned.exists()
            assert Path(used).is_dir(), "its process lives"
            assert begun.is_dir(), "it may be locked in a moment"
            assert (tmp_path / "of others").is_dir()
            assert Path(next_one).is_dir()
    assert not Path(used).exists()
