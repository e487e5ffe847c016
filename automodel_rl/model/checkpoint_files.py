"""A Hugging Face checkpoint on disk: finding it, describing it, and checking its files before anything is built."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from automodel_rl.errors import InputError
from automodel_rl.parallel.combinations import ModelDescription

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def resolve_checkpoint(path: str) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (or found in the cache) first."""
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(
                snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
            )
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise InputError(
                f"model.path={path}: not a folder, and no such model could be fetched from the hub "
                f"({type(error).__name__}): give the folder of a Hugging Face checkpoint"
            ) from None
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path={path}: has no config.json: give the folder of a Hugging Face checkpoint")
    return folder


def read_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # config classes check their fields with errors of their own
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"model.path={folder}: config.json is not a model config of transformers ({reason})") from None


def describe_model(config: PretrainedConfig) -> ModelDescription:
    """What the table of supported combinations needs to know."""
    values = config.to_dict()
    layer_types = values.get("layer_types") or []
    uses_window = values.get("use_sliding_window", True) and values.get("sliding_window") is not None
    return ModelDescription(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        attention_dropout=float(values.get("attention_dropout") or 0.0),
        has_sliding_window="sliding_attention" in layer_types or (not layer_types and uses_window),
    )


def check_weights(folder: Path, model: PreTrainedModel) -> None:
    """Compares the checkpoint's tensors with the model's parameters by name and shape, reading headers only.

    Raises:
        InputError: no weights, a damaged file, a tensor that is missing or has another shape, or a head that differs
            from the embedding it is tied to.
    """
    files, shapes = {}, {}
    for file in _weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                files[name], shapes[name] = file, tuple(tensors.get_slice(name).get_shape())
    is_tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if name == TIED_HEAD and is_tied:
            continue
        if name not in shapes:
            raise InputError(f"{folder}: the checkpoint has no tensor {name}, which {type(model).__name__} needs")
        if shapes[name] != tuple(parameter.shape):
            raise InputError(
                f"{folder}: {name} has shape {shapes[name]} in the weights but {tuple(parameter.shape)} by config.json"
            )
    if is_tied and TIED_HEAD in files:
        with _open(files[TIED_HEAD]) as heads, _open(files[EMBEDDING]) as embeddings:
            same = torch.equal(heads.get_tensor(TIED_HEAD), embeddings.get_tensor(EMBEDDING))
        if not same:
            raise InputError(
                f"{folder}: config.json ties {TIED_HEAD} to {EMBEDDING} but the weights differ: "
                "set tie_word_embeddings to false in config.json, or remove the head from the weights"
            )


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: damaged or incomplete safetensors file ({error}): copy or download it again"
        ) from None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise InputError(f"{folder / INDEX}: damaged or incomplete ({error}): copy or download it again") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(f"{folder}: {INDEX} names {missing[0]}, which is not there: copy or download it again")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise InputError(
        f"{folder}: no weights: expected {SINGLE} or {INDEX}; save the model with save_pretrained (safetensors) first"
    )
