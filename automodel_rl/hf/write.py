"""Writes a model's parts as one Hugging Face checkpoint: each stage its own tensors, rank 0 the rest."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.families.classifier import is_classifier
from automodel_rl.files import atomic_folder
from automodel_rl.hf.exported_config import QUANTIZATION, merge_source_config
from automodel_rl.hf.generation import write_generation
from automodel_rl.hf.names import INDEX, SINGLE
from automodel_rl.manifest import StoredFile, hash_file, write_manifest
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.tokenizer_files import save_tokenizer

KEPT_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "spk_dict.pt",  # voices of Qwen2.5-Omni, without which transformers opens no whole model
)

FILE_BYTES = 4 * 2**30
"""Maximum size of a weight file."""


@dataclass(frozen=True)
class ComponentTensors:
    """The tensors of a model component.

    Attributes:
        named_tensors: names and whole tensors of this rank's stages; iterating is a collective of the stage's ranks.
    """

    name: str
    layout: Layout
    named_tensors: Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class WeightFile:
    """A written weight file: its name, the bytes of each tensor in it, and its size and hash."""

    name: str
    sizes: dict[str, int]
    stored: StoredFile


def save_hf_checkpoint(
    folder: Path,
    components: Iterable[ComponentTensors],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path,
    world: dist.ProcessGroup,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Writes a checkpoint that transformers can open. A collective.

    Args:
        folder: the folder to write, on a file system shared by all ranks; replaced if it exists.
        source: the original checkpoint's folder, whose generation settings and processors are kept.
        stop_token_ids: stop tokens besides those of the source's settings.
    """
    with atomic_folder(folder, world) as unfinished:
        own: list[WeightFile] = []
        for component in components:
            stage = f"{component.name}-{component.layout.pp_rank}"
            for number, tensors in enumerate(_files(component.named_tensors, keep=component.layout.writes_for_stage)):
                own.append(_write_file(unfinished / f"{stage}-{number}.safetensors", tensors))
        files = [file for of_rank in gather_objects(own, world) for file in of_rank]
        if dist.get_rank() == 0:
            named = _name_files(unfinished, sorted(files, key=lambda file: file.name))
            write_description(unfinished, config, tokenizer, source, stop_token_ids)
            write_manifest(unfinished, named)


def write_weights(folder: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, StoredFile]:
    """Writes all tensors of a model from one process. Returns sizes and hashes of the files by name."""
    files = []
    for number, tensors in enumerate(_files(named_tensors, keep=True)):
        files.append(_write_file(folder / f"{number:05d}.safetensors", tensors))
    return _name_files(folder, files)


def write_description(
    folder: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    source: Path,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Writes the files of a checkpoint besides its weights. The arguments are those of `save_hf_checkpoint`."""
    exported = type(config).from_dict(config.to_dict())
    if QUANTIZATION in exported.to_dict():  # exported weights are plain
        delattr(exported, QUANTIZATION)
    exported.save_pretrained(folder)
    merge_source_config(folder, source)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    if not is_classifier(config):
        write_generation(folder, source, config, stop_token_ids)
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def _files(named_tensors: Iterable[tuple[str, Tensor]], keep: bool) -> Iterator[dict[str, Tensor]]:
    """Yields tensors on the host, one dict per file; nothing on ranks that only take part in gathering."""
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


def _write_file(path: Path, tensors: dict[str, Tensor]) -> WeightFile:
    save_file(tensors, path, {"format": "pt"})
    return WeightFile(path.name, {key: tensor.nbytes for key, tensor in tensors.items()}, hash_file(path))


def _name_files(folder: Path, files: list[WeightFile]) -> dict[str, StoredFile]:
    """Renames stage files to Hugging Face's names, and writes the index if there are several. Returns sizes and
    hashes by new name."""
    if len(files) == 1:
        (folder / files[0].name).rename(folder / SINGLE)
        return {SINGLE: files[0].stored}
    weight_map: dict[str, str] = {}
    named: dict[str, StoredFile] = {}
    for number, file in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / file.name).rename(folder / final)
        named[final] = file.stored
        weight_map |= dict.fromkeys(file.sizes, final)
    total = sum(size for file in files for size in file.sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    return named
