"""Characters of records that no tokenizer reads."""

import re
from typing import Any

from automodel_rl.errors import InputError

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a pair of UTF-16. JSON can write one alone, such as "caf\\\\udce9", and UTF-8 cannot."""


def check_characters(value: Any, name: str, where: str) -> None:
    """Raises InputError if a text in a value, at any depth, has a lone surrogate.

    Args:
        value: the value, as JSON holds it.
        name: the column that it comes from.
        where: the record's place in the data, for error messages.
    """
    if isinstance(value, str):
        if not value.isascii() and (found := SURROGATE.search(value)):
            around = value[max(0, found.start() - 20) : found.end()]
            raise InputError(
                f"{where}: {name} has the character {found[0]!a}, which is half of one (a lone surrogate) and which no "
                f"tokenizer reads, in {around!a}: put the right character in its place, or remove the record"
            )
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_characters(key, name, where)
            check_characters(inner, name, where)
    elif isinstance(value, list):
        for inner in value:
            check_characters(inner, name, where)
