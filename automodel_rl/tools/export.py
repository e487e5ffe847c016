"""`automodel-rl export`: writes a Hugging Face folder from any checkpoint of a run, in one process, tensor by
tensor."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.checkpoint.folder import CONFIG, TEMPLATE, TENSORS, check_files, is_complete, read_marker
from automodel_rl.checkpoint.state import BUFFER, WEIGHT
from automodel_rl.checkpoint.storage import SafetensorsReader
from automodel_rl.config import ModelConfig, RunConfig, load_config
from automodel_rl.config.load import parse_overrides
from automodel_rl.data.padding import padding_of
from automodel_rl.data.stop_tokens import NewStopTokens, new_stop_tokens
from automodel_rl.errors import InputError
from automodel_rl.estimate.parameter_sizes import empty_parts
from automodel_rl.families.classifier import is_classifier
from automodel_rl.families.known import language_config
from automodel_rl.files import check_writable, new_folder
from automodel_rl.hf.adapter_pieces import adapter_pieces, one_by_one
from automodel_rl.hf.find import ModelFiles, find_model
from automodel_rl.hf.names import to_hf
from automodel_rl.hf.read import TIED_HEAD, Checkpoint, read_config, read_whole_config
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.hf.write import write_description, write_weights
from automodel_rl.lora.layers import is_adapter
from automodel_rl.lora.peft import CONFIG as ADAPTER_CONFIG
from automodel_rl.lora.peft import AdapterOrigin, write_adapters, write_single_adapters
from automodel_rl.manifest import StoredFile, write_manifest
from automodel_rl.model.parallelise import dtypes_of
from automodel_rl.observe.run_files import RunFiles
from automodel_rl.support.description import describe_model
from automodel_rl.tokenizer_files import save_tokenizer
from automodel_rl.weight_sync.published import PublishedWeights
from automodel_rl.weight_sync.version_files import VERSION_FILE

Adapters = Literal["peft", "merged", "per-expert"]
"""Output for adapters: PEFT files, a merged model, or adapter files with one entry per expert."""

FLAGS: dict[Adapters, str] = {"merged": "--merge", "per-expert": "--per-expert"}
"""The matching command-line flags."""

HOW: dict[Adapters, str] = {"merged": ", with its adapters merged in"}
"""The matching text for the console."""


def export(checkpoint: Path, out: Path, overrides: Sequence[str] = (), adapters: Adapters = "peft") -> None:
    """Writes the `final/` that a run would write after the checkpoint's step, or a model with plain weights.

    Memory holds one tensor at a time, the contents of one file, and all adapters.

    Args:
        checkpoint: a `step_N` folder, a run (its newest), adapters, a published version, a quantized model. Untrusted.
        out: the folder to write, which must not exist.
        overrides: config overrides as on the command line, such as a new path of the model.
        adapters: output format of adapters. A folder of adapters cannot be exported as "peft" again.

    Raises:
        InputError: the checkpoint is incomplete, its model is not found, or `out` exists or cannot be written.
    """
    if os.path.lexists(out):
        raise InputError(f"{out}: already exists; export creates its own folder, so name a new one")
    check_writable(out, str(out))
    checkpoint = _newest_in(checkpoint)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        _export_adapters(checkpoint, out, overrides, adapters)
        return
    if (checkpoint / VERSION_FILE).is_file():
        _export_published(checkpoint, out, overrides)
        return
    if (checkpoint / "config.json").is_file():
        _export_plain(checkpoint, out, overrides, adapters)
        return
    marker = read_marker(checkpoint)
    check_files(checkpoint, marker, marker.files)
    # Only the caller, not the checkpoint's config, may allow running code or reading other files.
    harmless = ["--model.trust_remote_code", "false", "--model.pickled_weights", "[]", "--data.chat_template", "null"]
    config: RunConfig = load_config(checkpoint / CONFIG, [*harmless, *overrides])
    files = find_model(config.model)
    model = files.described(config.model)
    whole_config = read_config(files.folder, model.num_labels, model.text_only)
    size, trusts = language_config(whole_config).vocab_size, model.trust_remote_code
    tokenizer = load_tokenizer(files.tokenizer_folder, size, trust_remote_code=trusts)
    if TEMPLATE in marker.files:
        tokenizer.chat_template = (checkpoint / TEMPLATE).read_text()
    reader, weights = SafetensorsReader(checkpoint / TENSORS), open_weights(files, whole_config, model.pickled_weights)
    if adapters != "peft" and model.lora is None:
        raise InputError(f"{checkpoint}: has no adapters: remove {FLAGS[adapters]}")
    if adapters == "per-expert":
        _check_single(weights)
    alone = model.lora if adapters != "merged" else None  # adapters that are not merged
    variables = config.data.chat_template_kwargs
    tokenizer, ends = _with_ends(files.folder, whole_config, tokenizer, variables, adapters=alone is not None)

    def write(folder: Path) -> dict[str, StoredFile]:
        if alone is not None:
            _write_adapters(folder, _trained(reader), AdapterOrigin(alone, files.name, weights.family), adapters)
            save_tokenizer(tokenizer, folder)
            return {}
        tensors_of = _model_tensors if model.lora is None else _merged_run
        written = write_weights(folder, tensors_of(reader, model, weights, whole_config))
        exported = read_whole_config(files.folder) if weights.is_composite else whole_config
        write_description(folder, _in_dtype(exported, dtypes_of(model).compute), tokenizer, files.folder, ends.ids)
        return written

    _publish(out, write, f"the model after step {marker.step}{HOW.get(adapters, '')}", ends.note)


def _with_ends(
    folder: Path,
    whole: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
    *,
    adapters: bool,
) -> tuple[PreTrainedTokenizerBase, NewStopTokens]:
    """Returns the tokenizer to save and the end tokens after training. Sets the padding token in a classifier's
    config."""
    if not is_classifier(whole):
        return tokenizer, new_stop_tokens(folder, whole, tokenizer, variables, adapters=adapters)
    padding = padding_of(whole, tokenizer, variables)
    whole.pad_token_id = whole.pad_token_id if padding.token is None else padding.token
    return padding.tokenizer, NewStopTokens((), padding.note)


def open_weights(files: ModelFiles, config: PretrainedConfig, pickled: Sequence[str] = ()) -> Checkpoint:
    """Opens a checkpoint's tensors, with expert stacks transposed as in the model.

    Args:
        pickled: names of pickled weight files that may be read.
    """
    weights = Checkpoint(files, config, pickled)
    if weights.family.file_names.files_transpose_experts:
        for part in empty_parts(config, torch.bfloat16, ModelConfig(path=str(files.folder))):
            weights.check(part)
    return weights


def _write_adapters(folder: Path, tensors: dict[str, Tensor], origin: AdapterOrigin, adapters: Adapters) -> None:
    if adapters == "per-expert":
        write_single_adapters(folder, one_by_one(tensors, origin.family), origin)
    else:
        write_adapters(folder, tensors, origin)


def _check_single(source: Checkpoint) -> None:
    if source.family.file_names.experts is None or source.is_composite:
        raise InputError(
            f"--per-expert: vLLM supports no per-expert names for {source.family.name} models, and reads PEFT's own "
            "files for most of them: remove --per-expert"
        )


def _newest_in(folder: Path) -> Path:
    """Returns the newest complete checkpoint of a run's folder; another folder as it is."""
    complete = [path for path in RunFiles(folder).list_checkpoints() if is_complete(path)]
    if not complete:
        return folder
    print(f"exporting {complete[-1]}", flush=True)
    return complete[-1]


def _export_adapters(folder: Path, out: Path, overrides: Sequence[str], kind: Adapters) -> None:
    """Merges a folder of adapters into its base checkpoint, in that checkpoint's dtype, or writes adapters per
    expert."""
    given = dict(parse_overrides(overrides))
    if kind == "peft":
        raise InputError(
            f"{folder}: already holds adapters in PEFT's format: add --merge to write a whole model, or --per-expert "
            "for vLLM"
        )
    if given.keys() - {"model.path"}:
        raise InputError(f"--{min(given.keys() - {'model.path'})}: only --model.path is read for a folder of adapters")
    base = given.get("model.path")
    adapters_of_base = None if base is None else str(folder)
    files = find_model(ModelConfig(path=base or str(folder), adapters=adapters_of_base, merge_adapters=True))
    adapters = files.adapters
    assert adapters is not None  # merge_adapters needs some
    config = read_config(files.folder, adapters.num_labels)
    tokenizer = load_tokenizer(files.tokenizer_folder, language_config(config).vocab_size)
    dtype = config.dtype or torch.bfloat16
    parts = empty_parts(config, dtype, ModelConfig(path=str(files.folder)))
    adapters.check(parts)
    weights = open_weights(files, config)
    if adapters.config.base == "nf4":
        weights.read_base_in_nf4(parts[0], adapters.tensors)
    tokenizer, ends = _with_ends(files.folder, config, tokenizer, adapters=kind == "per-expert")
    if kind == "per-expert":
        _check_single(weights)

    def write(unfinished: Path) -> dict[str, StoredFile]:
        if kind == "per-expert":
            _write_adapters(
                unfinished, adapters.tensors, AdapterOrigin(adapters.config, files.name, weights.family), kind
            )
            save_tokenizer(tokenizer, unfinished)
            return {}
        written = write_weights(unfinished, merged_tensors(weights, adapters.tensors, adapters.config.scale, dtype))
        write_description(unfinished, config, tokenizer, files.folder, ends.ids)
        return written

    how = "merged in" if kind == "merged" else "split by expert"
    _publish(out, write, f"{files.name} with the adapters of {folder} {how}", ends.note)


def _export_plain(folder: Path, out: Path, overrides: Sequence[str], adapters: Adapters) -> None:
    config = read_config(folder)
    method = describe_model(config).quantization
    if not method:
        raise InputError(f"{folder}: is already a model with plain weights: pass a step_N folder of a run")
    if overrides or adapters != "peft":
        raise InputError(f"{folder}: is a model with {method} weights: export takes no further arguments for it")
    tokenizer = load_tokenizer(folder, language_config(config).vocab_size)
    weights = Checkpoint(find_model(ModelConfig(path=str(folder))), config)

    def write(unfinished: Path) -> dict[str, StoredFile]:
        written = write_weights(unfinished, merged_tensors(weights, {}, 1.0, torch.bfloat16))
        write_description(unfinished, _in_dtype(config, torch.bfloat16), tokenizer, folder)
        return written

    _publish(out, write, f"{folder} with plain weights")


def _export_published(version: Path, out: Path, overrides: Sequence[str]) -> None:
    """Writes a published version of a run's weights, with the tokenizer of the run's initial model."""
    given = dict(parse_overrides(overrides))
    if given.keys() != {"model.path"}:
        raise InputError(
            f"{version}: a published version has only weights: add --model.path with the model that the run started "
            "from, and nothing else"
        )
    files = find_model(ModelConfig(path=given["model.path"]))
    config = read_config(files.folder)
    tokenizer = load_tokenizer(files.tokenizer_folder, language_config(config).vocab_size)
    tensors: dict[str, Tensor] = {}
    number = PublishedWeights(version.parent).load_version(tensors, int(version.name))
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    weights = open_weights(files, config)
    foreign = weights.unused(empty_parts(config, dtype, ModelConfig(path=str(files.folder))))
    tensors |= {name: weights.read_untrained(name, dtype) for name in foreign}

    def write(unfinished: Path) -> dict[str, StoredFile]:
        written = write_weights(unfinished, sorted(tensors.items()))
        exported = read_whole_config(files.folder) if weights.is_composite else config
        write_description(unfinished, _in_dtype(exported, dtype), tokenizer, files.folder)
        return written

    _publish(out, write, f"the model after {number} optimizer steps")


def _publish(out: Path, write: Callable[[Path], dict[str, StoredFile]], *lines: str) -> None:
    """Writes a folder and its manifest atomically, then prints the non-empty lines. `write` returns the files it has
    hashed."""
    with new_folder(out) as unfinished:
        write_manifest(unfinished, write(unfinished))
    for line in filter(None, lines):
        print(f"{out}: {line}")


def _in_dtype(config: PretrainedConfig, dtype: torch.dtype) -> PretrainedConfig:
    exported = type(config).from_dict(config.to_dict())
    exported.dtype = dtype
    return exported


def _trained(reader: SafetensorsReader) -> dict[str, Tensor]:
    """Reads a checkpoint's adapters and other saved modules."""
    return {match[2]: reader.read(key) for key in reader.shapes if (match := WEIGHT.fullmatch(key))}


def merged_tensors(
    source: Checkpoint, trained: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields a checkpoint's tensors under their file names, with adapters merged in and other trained modules
    substituted.

    Args:
        trained: adapters and saved modules, by their names in the model.
        scale: factor of the adapters' output.
        dtype: dtype of floating-point results; other buffers keep theirs.
    """
    adapted = adapter_pieces(trained, source.family)
    saved = {
        piece: tensor
        for name, whole in trained.items()
        if not is_adapter(name)
        for piece, tensor in to_hf(name, whole, source.family)
    }
    for name in source.names:
        tensor = saved.pop(name) if name in saved else source.read(name)
        if name in adapted:
            tensor = adapted[name].merged_into(tensor, scale)
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
    yield from ((name, tensor.to(dtype)) for name, tensor in saved.items())


def _merged_run(
    reader: SafetensorsReader, model: ModelConfig, source: Checkpoint, config: PretrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors under their Hugging Face names, with a run's adapters merged into its base."""
    assert model.lora is not None
    trained, dtype = _trained(reader), dtypes_of(model).compute
    if model.lora.base == "nf4":
        source.read_base_in_nf4(empty_parts(config, dtype, model)[0], trained)
    return merged_tensors(source, trained, model.lora.scale, dtype)


def _model_tensors(
    reader: SafetensorsReader, model: ModelConfig, source: Checkpoint, config: PretrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors under their Hugging Face names: trained weights in the compute dtype, buffers in their own, and
    untrained tensors from the source, including those outside the model's parts, such as MTP layers."""
    dtype = dtypes_of(model).compute
    foreign = {*source.unused(empty_parts(config, dtype, model))}
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
    for name in source.names:
        if name in foreign:
            yield name, source.read_untrained(name, dtype)
        elif name not in seen and not (config.tie_word_embeddings and name.endswith(TIED_HEAD)):
            tensor = source.read(name)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
