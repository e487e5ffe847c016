"""`automodel-rl verify-checkpoint`: checks that a checkpoint or exported folder is complete and intact."""

from pathlib import Path

from automodel_rl.checkpoint.folder import check_files, read_marker
from automodel_rl.hf.find import is_exported
from automodel_rl.manifest import check_exported


def verify_checkpoint(folder: Path) -> None:
    """Reads every file of a checkpoint, or of a Hugging Face folder with a manifest, and prints a summary.

    Raises:
        InputError: a file is missing or altered, or there is no record of the contents.
    """
    if is_exported(folder):
        files = check_exported(folder, whole=True)
        size = sum(file.bytes for file in files.values())
        print(f"{folder}: intact. {len(files)} files, {size / 2**30:.2f} GiB, each as written")
        return
    marker = read_marker(folder)
    check_files(folder, marker, marker.files)
    size = sum(file.bytes for file in marker.files.values())
    print(
        f"{folder}: intact. After step {marker.step}, written by {marker.world_size} ranks, {len(marker.files)} files, "
        f"{size / 2**30:.2f} GiB, each as written"
    )
