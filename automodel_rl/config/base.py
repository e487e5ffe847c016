"""Base class and field types of config sections. Sections reject unknown keys and are immutable."""

import os
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        serialize_by_alias=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, values: Any) -> Any:
        """Gives a section with nothing but comments below its name the defaults of all its keys."""
        if not isinstance(values, dict):
            return values
        kinds = {info.alias or name: info.annotation for name, info in cls.model_fields.items()}
        sections = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
        return {name: {} if value is None and name in sections else value for name, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _lists_of_one(cls, values: Any) -> Any:
        """Wraps a single value in a list where a list of any length is expected."""
        if not isinstance(values, dict):
            return values
        lists = {name for name, info in cls.model_fields.items() if _is_list(info.annotation)}
        return {
            name: [value] if name in lists and isinstance(value, str | dict) else value
            for name, value in values.items()
        }


def _is_list(annotation: Any) -> bool:
    """Whether a field is a variable-length list of strings or sections."""
    if get_origin(annotation) is not tuple or get_args(annotation)[-1] is not Ellipsis:
        return False
    item = get_args(annotation)[0]
    return item is str or get_origin(item) is Literal or (isinstance(item, type) and issubclass(item, Section))


Positive = Annotated[int, Field(gt=0)]
BatchSize = Annotated[int, Field(gt=0, le=1_000_000)]
"""Number of examples per step. Values above 1,000,000 are rejected as typos."""

Fraction = Annotated[float, Field(ge=0, le=1)]


def _checked_path(text: str) -> str:
    if "\0" in text or len(os.fsencode(text)) > LONGEST_PATH or any(len(n) > LONGEST_NAME for n in _names(text)):
        raise ValueError(
            f"is not a path: it contains a null character, is longer than {LONGEST_PATH} bytes, or has a name longer "
            f"than {LONGEST_NAME} bytes: set the path of a file or folder"
        )
    return os.path.expanduser(text)


def _names(text: str) -> list[bytes]:
    return os.fsencode(text).split(b"/")


LONGEST_PATH, LONGEST_NAME = 4000, 250
"""Maximum bytes of a path and of a name in it: a little below the limits of file systems, to leave room for
suffixes."""

PathText = Annotated[str, AfterValidator(_checked_path)]
"""A path, in which ~ is the home folder, or the hub id of a model or dataset."""
