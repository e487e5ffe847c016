"""Locates a model's checkpoint and adapters, in folders or on the hub."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from automodel_rl.config import ModelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.lora.peft import CONFIG as ADAPTER_CONFIG
from automodel_rl.lora.peft import HEAD, AdapterFolder
from automodel_rl.manifest import MANIFEST, check_exported

DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Patterns of a checkpoint's files besides its weights."""

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of tokenizer files. Without any, transformers silently opens an empty tokenizer."""


@dataclass(frozen=True)
class ModelFiles:
    """The local files of a model.

    Attributes:
        name: the folder's absolute path, or the hub id.
        lora: config of the adapters to train; None if weights are trained.
    """

    folder: Path
    name: str
    adapters: AdapterFolder | None = None
    lora: LoraConfig | None = None

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer: the adapters' if it has one, since they were trained with it."""
        if self.adapters is not None and (self.adapters.folder / "tokenizer_config.json").is_file():
            return self.adapters.folder
        return self.folder

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has tokenizer files. A folder with only config.json, for planning, has none."""
        return any(path for pattern in TOKENIZERS for path in self.tokenizer_folder.glob(pattern))

    def described(self, model: ModelConfig) -> ModelConfig:
        """Returns a model's config with its local folder and the config of the adapters to train."""
        lora = self.lora
        if lora is not None and model.num_labels is not None and HEAD not in lora.modules_to_save:
            lora = lora.model_copy(update={"modules_to_save": (*lora.modules_to_save, HEAD)})  # starts random
        own = {"path": str(self.folder), "lora": lora, "adapters": None, "merge_adapters": False}
        return model.model_copy(update=own)


def find_model(model: ModelConfig, with_weights: bool = True) -> ModelFiles:
    """Locates a model's checkpoint and adapters, downloading those with a hub id unless cached.

    Raises:
        InputError: there is no such checkpoint, a file differs from its export, or the adapters contradict
            `model.lora`.
    """
    folder, name = _fetch("model.path", model.path, with_weights), model.path
    adapters = None if model.adapters is None else _fetch("model.adapters", model.adapters, with_weights=True)
    if not (folder / "config.json").is_file() and (folder / ADAPTER_CONFIG).is_file():
        if adapters is not None:
            raise InputError(
                f"model.path={model.path}: has adapters, and so has model.adapters={model.adapters}: set model.path to "
                "the checkpoint that they belong to"
            )
        adapters = _fetch("model.path", model.path, with_weights=True)
        of_adapters = AdapterFolder(adapters)
        name = of_adapters.base
        if of_adapters.base_revision != "main" and not os.path.isdir(name):
            raise InputError(
                f"{adapters / ADAPTER_CONFIG}: revision={of_adapters.base_revision}: pass the folder of that revision "
                f"of {name} in model.path, and these adapters in model.adapters"
            )
        try:
            folder = _fetch("base_model_name_or_path", name, with_weights)
        except InputError as error:
            raise InputError(
                f"{adapters / ADAPTER_CONFIG}: {error}, in model.path, and these adapters in model.adapters"
            ) from None
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path={model.path}: has no config.json: pass the folder of a Hugging Face checkpoint")
    name = str(folder.absolute()) if Path(name).is_dir() else name
    if adapters is None:
        if model.merge_adapters:
            raise InputError(
                f"model.merge_adapters=true: {model.path} has no adapters: name them in model.adapters, or remove it"
            )
        return ModelFiles(folder, name, lora=model.lora)
    found = AdapterFolder(adapters, model.merge_adapters)
    return ModelFiles(folder, name, found, _lora_of(model, found))


def is_exported(folder: Path) -> bool:
    """Returns whether a folder holds a model or adapters rather than a checkpoint of a run."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG, MANIFEST))


def _fetch(key: str, path: str, with_weights: bool) -> Path:
    if os.path.isdir(path):
        if with_weights:
            check_exported(Path(path), whole=False)
        return Path(path)
    if path.startswith(("/", ".")) or path.count("/") > 1:
        raise InputError(
            f"{key}={path}: folder does not exist: pass the folder of a Hugging Face checkpoint, or a hub id"
        )
    patterns = DESCRIPTIONS + (["*.safetensors"] if with_weights else [])
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        remedy = "pass the folder of a Hugging Face checkpoint"
        if isinstance(error, GatedRepoError):
            remedy = f"request access on https://huggingface.co/{path}, and log in with hf auth login"
        raise InputError(
            f"{key}={path}: not a folder, and fetching it from the hub failed ({type(error).__name__}): {remedy}"
        ) from None


def _lora_of(model: ModelConfig, adapters: AdapterFolder) -> LoraConfig | None:
    """Returns the config of the adapters to train."""
    if model.merge_adapters:
        if model.lora is not None:
            raise InputError(
                "model.lora with model.merge_adapters=true: no folder holds the model that new adapters would belong "
                f"to: write it with automodel-rl export {adapters.folder} NEW --merge, and name NEW in model.path"
            )
        return None
    if model.lora is None:
        return adapters.config
    for key in sorted(model.lora.model_fields_set - {"dropout", "base"}):
        asked, there = getattr(model.lora, key), getattr(adapters.config, key)
        if _sorted(asked) != _sorted(there):
            raise InputError(
                f"model.lora.{key}={_sorted(asked)}: the adapters of {adapters.folder} have {_sorted(there)}: remove "
                f"model.lora.{key}, or set model.merge_adapters to true"
            )
    base = adapters.config.base
    if "base" in model.lora.model_fields_set:
        base = model.lora.base
        adapters.check_base(base)
    return adapters.config.model_copy(update={"dropout": model.lora.dropout, "base": base})


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, tuple) else value
