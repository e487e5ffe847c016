"""Files and folders that are complete or not there at all: they get their names when everything is in them."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def write_complete(path: Path, text: str) -> None:
    """Writes a text file in place of the one that may be there."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else it may be empty after a loss of power
    unfinished.rename(path)


@contextlib.contextmanager
def complete_folder(folder: Path, group: "ProcessGroup") -> Iterator[Path]:
    """A folder for several ranks to fill, which gets its name when all have left the block. A collective.

    Args:
        folder: replaced if it exists; on a file system that the ranks share.
        group: of the ranks.
    """
    from torch import distributed as dist  # late: launchers write files, too, and must not wait for torch

    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if group.rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier(group)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    dist.barrier(group)
    if group.rank() == 0:
        publish_folder(unfinished, folder)
    dist.barrier(group)


def publish_folder(unfinished: Path, folder: Path) -> None:
    """Gives a complete folder its name. What had that name before is removed last; until then it is beside it."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
