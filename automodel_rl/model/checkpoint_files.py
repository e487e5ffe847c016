"""A Hugging Face checkpoint on disk: finding it, describing it, and checking its files before anything is built."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from automodel_rl.errors import InputError
from automodel_rl.parallel.combinations import ModelDescription

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TIED_HEAD = "lm_head.weight"


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
    except (OSError, ValueError, KeyError) as error:
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
        tied_embeddings=bool(config.tie_word_embeddings),
        has_sliding_window="sliding_attention" in layer_types or (not layer_types and uses_window),
    )


def check_weights(folder: Path, model: PreTrainedModel) -> None:
    """Compares the checkpoint's tensors with the model's parameters by name and shape, reading headers only.

    Raises:
        InputError: no weights, a damaged file, or a tensor that is missing or has another shape.
    """
    shapes = dict(_tensor_shapes(folder))
    for name, parameter in model.named_parameters():
        if name not in shapes and name == TIED_HEAD and model.config.tie_word_embeddings:
            continue
        if name not in shapes:
            raise InputError(f"{folder}: the checkpoint has no tensor {name}, which {type(model).__name__} needs")
        if shapes[name] != tuple(parameter.shape):
            raise InputError(
                f"{folder}: {name} has shape {shapes[name]} in the weights but {tuple(parameter.shape)} by config.json"
            )


def _tensor_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in _weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    yield name, tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError, struct.error) as error:
            raise InputError(
                f"{file}: damaged or incomplete safetensors file ({error}): copy or download it again"
            ) from None


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(f"{folder}: {INDEX} names {missing[0]}, which is not there: copy or download it again")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise InputError(
        f"{folder}: no weights: expected {SINGLE} or {INDEX}; save the model with save_pretrained (safetensors) first"
    )
