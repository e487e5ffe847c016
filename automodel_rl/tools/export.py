"""`automodel-rl export`: a Hugging Face folder from any checkpoint of a run, by one process, tensor by tensor."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.checkpoint.folder import CONFIG, TEMPLATE, TENSORS, check_files, read_marker
from automodel_rl.checkpoint.state import BUFFER, WEIGHT
from automodel_rl.checkpoint.storage import SafetensorsReader
from automodel_rl.config import ModelConfig, RunConfig, load_config
from automodel_rl.data.chat import load_tokenizer
from automodel_rl.errors import InputError
from automodel_rl.files import publish_folder
from automodel_rl.hf.names import to_hf
from automodel_rl.hf.read import TIED_HEAD, Checkpoint, read_config, resolve_checkpoint
from automodel_rl.hf.write import write_description, write_weights
from automodel_rl.lora.layers import is_adapter
from automodel_rl.lora.peft import AdapterOrigin, write_adapters
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.support.description import language_config


def export(checkpoint: Path, out: Path, overrides: Sequence[str] = ()) -> None:
    """Writes the folder that a run would write as `final/` after the checkpoint's step.

    Memory holds one tensor of the model at a time, and the contents of one file.

    Args:
        checkpoint: a `step_N` folder. It need not be trusted.
        out: the folder to write, which must not exist.
        overrides: overrides of the run's config, as on the command line, such as the new place of its model.

    Raises:
        InputError: the checkpoint is not whole, its model is not found, or `out` exists or cannot be written.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; export makes its own folder, so name a new one")
    marker = read_marker(checkpoint)
    check_files(checkpoint, marker, marker.files)
    # Only the caller may allow running code or reading other files, not the checkpoint's config.
    harmless = ["--model.trust_remote_code", "false", "--model.pickled_weights", "[]", "--data.chat_template", "null"]
    config: RunConfig = load_config(checkpoint / CONFIG, [*harmless, *overrides])
    source = resolve_checkpoint(config.model.path)
    whole_config = read_config(source)
    tokenizer = load_tokenizer(
        source, config.data, language_config(whole_config).vocab_size, config.model.trust_remote_code
    )
    if TEMPLATE in marker.files:
        tokenizer.chat_template = (checkpoint / TEMPLATE).read_text()
    reader = SafetensorsReader(checkpoint / TENSORS)
    weights = Checkpoint(source, whole_config.model_type, config.model.pickled_weights)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        if config.model.lora is not None:
            origin = AdapterOrigin(config.model.lora, source, weights.family)
            write_adapters(unfinished, dict(_adapters(reader)), origin)
            tokenizer.save_pretrained(unfinished)
        else:
            write_weights(unfinished, _model_tensors(reader, config.model, weights))
            write_description(unfinished, _exported(whole_config, config.model), tokenizer, source)
        publish_folder(unfinished, out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out}: cannot be written ({error}): make room, or choose another place") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{out}: the model after step {marker.step}")


def _exported(config: PretrainedConfig, model: ModelConfig) -> PretrainedConfig:
    exported = type(config).from_dict(config.to_dict())
    exported.dtype = dtypes_of(model)[0]
    return exported


def _adapters(reader: SafetensorsReader) -> Iterator[tuple[str, Tensor]]:
    for key in reader.shapes:
        weight = WEIGHT.fullmatch(key)
        if weight is not None and is_adapter(weight[2]):
            yield weight[2], reader.read(key)


def _model_tensors(reader: SafetensorsReader, model: ModelConfig, source: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their Hugging Face names: trained weights in the compute dtype, buffers in their own dtype, and frozen
    weights from the source."""
    dtype = dtypes_of(model)[0]
    seen = set()
    for key in reader.shapes:
        weight, buffer = WEIGHT.fullmatch(key), BUFFER.fullmatch(key)
        if weight is not None:
            tensors = to_hf(weight[2], reader.read(key).to(dtype), source.family)
        elif buffer is not None:
            tensors = to_hf(buffer[2], reader.read(key), source.family)
        else:
            continue
        for name, tensor in tensors:
            seen.add(name)
            yield name, tensor
    for name in source.names if model.frozen else ():
        if name not in seen and not name.endswith(TIED_HEAD):
            tensor = source.read(name)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
