"""`automodel-rl verify-checkpoint`: checks that a checkpoint is whole."""

from pathlib import Path

from automodel_rl.checkpoint.folder import check_files, read_marker


def verify_checkpoint(folder: Path) -> None:
    """Reads every file of a checkpoint and prints what it holds.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    marker = read_marker(folder)
    check_files(folder, marker, marker.files)
    size = sum(file.bytes for file in marker.files.values())
    print(
        f"{folder}: whole. After step {marker.step}, written by {marker.world_size} ranks, "
        f"{len(marker.files)} files, {size / 2**30:.2f} GiB, every one as it was written"
    )
