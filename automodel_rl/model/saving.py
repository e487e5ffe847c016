"""Writing a model in parts as one Hugging Face checkpoint: every stage writes its own tensors, rank 0 the rest."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.model.checkpoint_files import INDEX, SINGLE
from automodel_rl.parallel.layout import Layout

FILE_BYTES = 4 * 2**30
"""Largest size of a weight file."""


def save_checkpoint(
    folder: Path,
    named_tensors: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    layout: Layout,
) -> None:
    """Writes a checkpoint that transformers opens; it appears under its name only when it is complete.

    A collective. The folder must be on a file system that all ranks share.

    Args:
        folder: replaced if it exists.
        named_tensors: this rank's stage, as whole tensors; iterating is a collective of the stage's ranks.
        config: saved as config.json.
        tokenizer: saved along, if given.
        layout: this rank's place.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    is_writer = layout.data_rank == 0
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier(layout.world_control)
    files = []
    for number, tensors in enumerate(_files(named_tensors)):
        if is_writer:
            name = f"stage-{layout.pp_rank}-{number}.safetensors"
            save_file(
                {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, unfinished / name, {"format": "pt"}
            )
            files.append((name, {key: tensor.nbytes for key, tensor in tensors.items()}))
    dist.barrier(layout.world_control)
    of_stages: list = [None] * layout.parallel.pp
    dist.all_gather_object(of_stages, files, group=layout.pp_control)
    if dist.get_rank() == 0:
        _name_files(unfinished, [file for stage in of_stages for file in stage])
        config.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        publish(unfinished, folder)
    dist.barrier(layout.world_control)


def publish(unfinished: Path, folder: Path) -> None:
    """Gives a complete folder its name; what had that name before is gone only afterwards."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    unfinished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _files(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if tensors and size + tensor.nbytes > FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = tensor
        size += tensor.nbytes
    if tensors:
        yield tensors


def _name_files(folder: Path, files: list[tuple[str, dict[str, int]]]) -> None:
    """Renames the stages' files to Hugging Face's names and writes the index, if there is more than one file."""
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (name, sizes) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / name).rename(folder / final)
        weight_map |= dict.fromkeys(sizes, final)
    total = sum(size for _, sizes in files for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def gather_whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of a (sharded) parameter in `dtype`; cast before it is gathered, so that less travels."""
    tensor = tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
