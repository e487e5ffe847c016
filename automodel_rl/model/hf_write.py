"""Writing a model in parts as one Hugging Face checkpoint: every stage writes its own tensors, rank 0 the rest."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.files import complete_folder
from automodel_rl.model.hf_names import INDEX, SINGLE
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout

GENERATION = "generation_config.json"

FILE_BYTES = 4 * 2**30
"""Largest size of a weight file."""


def save_hf_checkpoint(
    folder: Path,
    named_tensors: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path,
    layout: Layout,
) -> None:
    """Writes a checkpoint that transformers opens. A collective.

    Args:
        folder: replaced if it exists; on a file system that all ranks share.
        named_tensors: this rank's stage, as whole tensors; iterating is a collective of the stage's ranks.
        config: saved as config.json.
        tokenizer: saved along, if given.
        source: the checkpoint it comes from, whose generation settings are kept.
        layout: this rank's place.
    """
    with complete_folder(folder, layout.world_control) as unfinished:
        files = []
        for number, tensors in enumerate(_files(named_tensors, keep=layout.writes_for_stage)):
            name = f"stage-{layout.pp_rank}-{number}.safetensors"
            save_file(tensors, unfinished / name, {"format": "pt"})
            files.append((name, {key: tensor.nbytes for key, tensor in tensors.items()}))
        of_stages = gather_objects(files, layout.pp_control)
        if dist.get_rank() == 0:
            _name_files(unfinished, [file for stage in of_stages for file in stage])
            config.save_pretrained(unfinished)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            if (source / GENERATION).is_file():
                shutil.copy(source / GENERATION, unfinished / GENERATION)


def _files(named_tensors: Iterable[tuple[str, Tensor]], keep: bool) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file after the other, on the host; nothing on ranks that only help to gather them."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if not keep:
            continue
        if tensors and size + tensor.nbytes > FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = tensor.cpu().contiguous()
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
