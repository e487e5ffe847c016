"""Columns of records: renamed, nested, or joined from several."""

from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.errors import InputError

MISSING = object()
"""Sentinel for the value of a column that a record lacks."""


def names_of(config: SourceConfig, column: Column) -> tuple[str, ...]:
    """Returns the names of a column in a source's data; more than one if several columns are joined."""
    names = config.columns.get(column, column)
    return (names,) if isinstance(names, str) else names


def look_up(record: dict[str, Any], name: str) -> Any:
    """Returns the value of a name such as `answer`, or `reward_model.ground_truth` inside a column; otherwise
    `MISSING`."""
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            return MISSING
        value = value[key]
    return value


def value_of(record: dict[str, Any], config: SourceConfig, column: Column, where: str) -> Any:
    """Returns the value of a column, or `MISSING`. Several columns are joined in order, one line each, skipping empty
    ones."""
    names = names_of(config, column)
    values = [look_up(record, name) for name in names]
    if len(names) == 1 or all(value is MISSING for value in values):
        return values[0]
    texts = [value for value in values if value not in (MISSING, None, "")]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(
                f"{where}: columns.{column} joins texts, but one of {', '.join(names)} is {type(text).__name__}: name "
                "text columns"
            )
    return "\n".join(texts)


def is_ignored(config: SourceConfig, column: Column) -> bool:
    return any(name in config.ignore for name in names_of(config, column))


def optional(record: dict[str, Any], config: SourceConfig, column: Column, where: str = "") -> Any:
    """Returns the value of a column; None if it is missing or ignored."""
    value = MISSING if is_ignored(config, column) else value_of(record, config, column, where)
    return None if value is MISSING else value


def required(record: dict[str, Any], config: SourceConfig, column: Column, where: str) -> Any:
    """Returns the value of a column that must be present and not ignored."""
    names = names_of(config, column)
    if is_ignored(config, column):
        raise InputError(f"{where}: ignore names the column {names[0]!r}, which is required: remove it")
    value = value_of(record, config, column, where)
    if value is MISSING:
        raise InputError(
            f"{where}: no column {' or '.join(map(repr, names))}, only {', '.join(record) or 'none'}: name the column "
            f"of the {column} in columns: {{{column}: NAME}}"
        )
    return value
