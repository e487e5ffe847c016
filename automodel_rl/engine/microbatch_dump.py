"""Saves microbatches at which training failed, for inspection."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from automodel_rl.batch import Microbatch

FIELDS = ("input_ids", "position_ids", "targets", "loss_mask", "cu_seqlens")


def dump_microbatches(file: Path, microbatches: Sequence[Microbatch], about: dict[str, str]) -> None:
    """Writes token tensors and values of microbatches to a safetensors file, replacing it, as `microbatch_N.NAME`.
    `about` goes into its metadata."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for number, microbatch in enumerate(microbatches):
        named = {name: getattr(microbatch, name) for name in FIELDS} | microbatch.values
        tensors |= {f"microbatch_{number}.{name}": tensor.cpu().contiguous() for name, tensor in named.items()}
    save_file(tensors, file, {"format": "pt", **about})
