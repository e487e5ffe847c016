"""The rows of a step that could not be trained on, in a file to look at."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from automodel_rl.batch import PackedBatch

FIELDS = ("input_ids", "position_ids", "targets", "loss_mask", "cu_seqlens")


def keep_rows(file: Path, batches: Sequence[PackedBatch], about: dict[str, str]) -> None:
    """Writes the token tensors and values of rows to a safetensors file, as `row_N.NAME`.

    Args:
        file: replaced if it exists.
        batches: this data rank's rows.
        about: what is said of them in the file's metadata.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for number, row in enumerate(batches):
        named = {name: getattr(row, name) for name in FIELDS} | row.values
        tensors |= {f"row_{number}.{name}": tensor.cpu().contiguous() for name, tensor in named.items()}
    save_file(tensors, file, {"format": "pt", **about})
