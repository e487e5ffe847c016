"""Rejection of characters that cannot be tokenised."""

import re
from typing import Any

from automodel_rl.errors import InputError

SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone UTF-16 surrogate: valid in JSON, as in "caf\\\\udce9", but not in UTF-8."""


def check_characters(value: Any, name: str, where: str) -> None:
    """Raises InputError if a text in a JSON value, at any depth, has a lone surrogate. `name` is the column."""
    if isinstance(value, str):
        if not value.isascii() and (found := SURROGATE.search(value)):
            around = value[max(0, found.start() - 20) : found.end()]
            raise InputError(
                f"{where}: {name} has the character {found[0]!a}, half of a pair (a lone surrogate), which no "
                f"tokenizer reads, in {around!a}: replace it with the right character, or remove the record"
            )
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_characters(key, name, where)
            check_characters(inner, name, where)
    elif isinstance(value, list):
        for inner in value:
            check_characters(inner, name, where)
