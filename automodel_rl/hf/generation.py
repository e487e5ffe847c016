"""generation_config.json: the stop tokens of transformers and vLLM, and the file of an exported model."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from automodel_rl.errors import InputError

GENERATION = "generation_config.json"

EOS = "eos_token_id"

OF_CONFIG = "_from_model_config"
"""Marks a file that transformers may regenerate from config.json."""

KEPT_IDS = ("bos_token_id", "pad_token_id")
"""Keys that transformers takes from config.json if there is no generation_config.json."""


def generation_stop_ids(folder: Path, config: PretrainedConfig) -> list[int]:
    """Returns transformers' stop tokens: those of generation_config.json, or of config.json if it names none.

    Raises:
        InputError: generation_config.json is damaged.
    """
    return _ids(_settings(folder).get(EOS), folder / GENERATION) or config_stop_ids(config)


def config_stop_ids(config: PretrainedConfig) -> list[int]:
    """Returns the stop tokens in config.json, including its text_config's."""
    values = config.to_dict()
    parts = [values, values.get("text_config") or {}]
    return [*dict.fromkeys(end for part in parts for end in _ids(part.get(EOS), Path("config.json")))]


def write_generation(folder: Path, source: Path, config: PretrainedConfig, stop_token_ids: Sequence[int]) -> None:
    """Writes an exported model's generation_config.json: the source checkpoint's, with additional stop tokens
    `stop_token_ids`. Without any, the file is copied as it is, if it exists."""
    if not stop_token_ids:
        if (source / GENERATION).is_file():
            shutil.copy(source / GENERATION, folder / GENERATION)
        return
    of_config = config.to_dict()
    values = _settings(source) or {key: of_config[key] for key in KEPT_IDS if of_config.get(key) is not None}
    values[EOS] = [*dict.fromkeys([*generation_stop_ids(source, config), *stop_token_ids])]
    values.pop(OF_CONFIG, None)
    (folder / GENERATION).write_text(json.dumps(values, indent=2))


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the contents of generation_config.json; empty if there is none."""
    file = folder / GENERATION
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error}): copy it again, or remove it") from None
    if not isinstance(values, dict):
        raise InputError(f"{file}: is not a JSON object: copy it again, or remove it")
    return values


def _ids(value: Any, file: Path) -> list[int]:
    """Returns the ids of an entry that is a token id, a list of them, or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise InputError(f"{file}: {EOS}={value!r} must be a token id or a list of them: correct it")
    return [one for one in ids if one >= 0]
