"""Columns of records: their names in the data, also inside of others, and several that make one."""

from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.errors import InputError

MISSING = object()
"""Stands for the value of a column that a record does not have."""


def names_of(config: SourceConfig, column: Column) -> tuple[str, ...]:
    """The names that a column has in a source's data; more than one if several columns make one text."""
    names = config.columns.get(column, column)
    return (names,) if isinstance(names, str) else names


def look_up(record: dict[str, Any], name: str) -> Any:
    """The value of a name such as `answer`, or `reward_model.ground_truth` inside of a column; else `MISSING`."""
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            return MISSING
        value = value[key]
    return value


def value_of(record: dict[str, Any], config: SourceConfig, column: Column, where: str) -> Any:
    """The value of a column, or `MISSING`. Several columns make one text: their texts in order, a line for each,
    without those that are empty.

    Raises:
        InputError: one of several columns holds something else than a text.
    """
    names = names_of(config, column)
    values = [look_up(record, name) for name in names]
    if len(names) == 1 or all(value is MISSING for value in values):
        return values[0]
    texts = [value for value in values if value not in (MISSING, None, "")]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(
                f"{where}: columns.{column} joins texts, and one of {', '.join(names)} is {type(text).__name__}: name "
                "columns of texts"
            )
    return "\n".join(texts)


def is_ignored(config: SourceConfig, column: Column) -> bool:
    return any(name in config.ignore for name in names_of(config, column))


def optional(record: dict[str, Any], config: SourceConfig, column: Column, where: str = "") -> Any:
    """The value of a column; None if it is missing or ignored."""
    value = MISSING if is_ignored(config, column) else value_of(record, config, column, where)
    return None if value is MISSING else value


def required(record: dict[str, Any], config: SourceConfig, column: Column, where: str) -> Any:
    """The value of a column.

    Raises:
        InputError: it is missing or ignored.
    """
    names = names_of(config, column)
    if is_ignored(config, column):
        raise InputError(f"{where}: ignore names the column {names[0]!r}, which is needed: leave it out")
    value = value_of(record, config, column, where)
    if value is MISSING:
        raise InputError(
            f"{where}: no column {' or '.join(map(repr, names))}, only {', '.join(record) or 'none'}: name the column "
            f"of the {column} in columns: {{{column}: NAME}}"
        )
    return value
