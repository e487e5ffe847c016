"""Entries of the source's config.json that an exported model keeps, for readers with older transformers.

transformers 5 saves some settings under other names than transformers 4 reads (`rope_parameters` for `rope_theta` and
`rope_scaling`, `dtype` for `torch_dtype`) and omits its own default values. Readers of the old names would then
silently use their own defaults. So the source's names are kept beside the new ones.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

CONFIG = "config.json"

QUANTIZATION = "quantization_config"

NOT_KEPT = frozenset((QUANTIZATION, "compression_config", "_name_or_path", "_commit_hash", "transformers_version"))
"""Source keys that are not true of the export: its weights are plain, and another program wrote its files."""

DTYPE, OLD_DTYPE = "dtype", "torch_dtype"

TEXT = "text_config"


def merge_source_config(folder: Path, source: Path) -> None:
    """Adds entries of the source checkpoint's config.json to an exported model's, unless transformers then reads it
    as another model."""
    written, original = (json.loads((of / CONFIG).read_text()) for of in (folder, source))
    merged = _merged(original, written, written.get(DTYPE))
    if merged == written:
        return
    without = _model_of(folder)
    (folder / CONFIG).write_text(json.dumps(merged, indent=2) + "\n")
    if _model_of(folder) != without:
        (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n")
        print(
            "warning: config.json has only the names of transformers 5, because it would describe a different model "
            f"with those of {source / CONFIG}: do not open it with transformers 4",
            flush=True,
        )


def _merged(original: dict[str, Any], written: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Adds entries that only the original has, recursively."""
    merged, dtype = dict(written), written.get(DTYPE, dtype)
    if TEXT in written and TEXT not in original:  # older form, with the language model's settings at the top level
        inner = {key: value for key, value in original.items() if key not in written and not isinstance(value, dict)}
        old = {key: original[key] for key in ("rope_scaling",) if original.get(key)}
        at_top = {OLD_DTYPE: dtype} if OLD_DTYPE in original else {}
        return merged | at_top | {TEXT: _merged(inner | old, written[TEXT], dtype)}
    for key, value in original.items():
        if key == OLD_DTYPE:
            merged[key] = dtype
        elif key not in written and key not in NOT_KEPT:
            merged[key] = value
        elif key.endswith("_config") and isinstance(value, dict) and isinstance(written.get(key), dict):
            merged[key] = _merged(value, written[key], dtype)
    return merged


def _model_of(folder: Path) -> dict[str, Any] | None:
    """Returns all values of a folder's config as this transformers reads them; None if it cannot."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception:  # config classes raise errors of their own
        return None
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in NOT_KEPT}
