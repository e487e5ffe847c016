"""Files and folders are complete or not there."""

from pathlib import Path

import pytest
import torch.distributed as dist

from automodel_rl.files import complete_folder, write_complete
from automodel_rl.launch.process_group import join_process_group, leave_process_group


def test_a_text_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for text in ("one", "two"):
        write_complete(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def fail_half_way(folder: Path, group: dist.ProcessGroup) -> None:
    with complete_folder(folder, group) as unfinished:
        (unfinished / "weights").write_text("ne")
        raise OSError("disk is full")


def test_a_folder_keeps_what_it_had_until_the_new_one_is_complete(tmp_path: Path) -> None:
    join_process_group(1)
    group = dist.group.WORLD
    try:
        with complete_folder(tmp_path / "final", group) as unfinished:
            (unfinished / "weights").write_text("old")
        with pytest.raises(OSError, match="disk is full"):
            fail_half_way(tmp_path / "final", group)
        assert (tmp_path / "final" / "weights").read_text() == "old"
        with complete_folder(tmp_path / "final", group) as unfinished:
            assert not any(unfinished.iterdir())
            (unfinished / "weights").write_text("new")
        assert (tmp_path / "final" / "weights").read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["final"]
    finally:
        leave_process_group()
