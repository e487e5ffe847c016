"""Tries an unsupported model family with the properties of a supported one."""

from pathlib import Path

from automodel_rl.errors import InputError, closest
from automodel_rl.families.file_names import TEXT_FILE_NAMES
from automodel_rl.families.known import FAMILIES
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.hf.read import read_config


def try_family(folder: Path, like: str) -> None:
    """Adds a family to this process's tables, with the properties of another.

    Args:
        folder: a folder with the family's config.json.
        like: `model_type` of the other family.

    Raises:
        InputError: the family is already supported, or the other one is not.
    """
    name = read_config(folder).model_type
    if name in FAMILIES:
        raise InputError(f"{folder}: the family {name!r} is already in the table: remove --family-like")
    if like not in TEXT_FAMILIES:
        near = closest(like, TEXT_FAMILIES)
        hint = f"did you mean {near}?" if near else f"use one of {', '.join(TEXT_FAMILIES)}"
        raise InputError(f"--family-like {like}: is not in the table: {hint}")
    FAMILIES[name] = TEXT_FAMILIES[name] = TEXT_FAMILIES[like]
    if like in TEXT_FILE_NAMES:
        TEXT_FILE_NAMES[name] = TEXT_FILE_NAMES[like]
