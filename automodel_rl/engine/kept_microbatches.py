"""Keeps microbatches that could not be trained on, in a file for inspection."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from automodel_rl.batch import Microbatch

FIELDS = ("input_ids", "position_ids", "targets", "loss_mask", "cu_seqlens")


def keep_microbatches(file: Path, microbatches: Sequence[Microbatch], about: dict[str, str]) -> None:
    """Writes the token tensors and values of microbatches to a safetensors file, as `microbatch_N.NAME` for
    microbatch N.

    Args:
        file: the file to write; replaced if it exists.
        microbatches: this data rank's microbatches.
        about: facts of the step, for the file's metadata.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for number, microbatch in enumerate(microbatches):
        named = {name: getattr(microbatch, name) for name in FIELDS} | microbatch.values
        tensors |= {f"microbatch_{number}.{name}": tensor.cpu().contiguous() for name, tensor in named.items()}
    save_file(tensors, file, {"format": "pt", **about})
