"""The pictures that a record names, put into the parts of its messages that stand for them."""

from pathlib import Path
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.data.columns import names_of, optional
from automodel_rl.data.messages import Message
from automodel_rl.errors import InputError


def with_pictures(messages: list[Message], record: dict[str, Any], config: SourceConfig, where: str) -> list[Message]:
    """The messages, in which every part of type image has its picture under the key `path`.

    A part may name its picture itself. Otherwise pictures come from the column `images`, in order. Relative paths begin
    at the data file's folder.

    Raises:
        InputError: there are more parts than pictures or fewer, or a picture is no file.
    """
    found = optional(record, config, "images", where)
    images = iter([] if found is None else found if isinstance(found, list) else [found])

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        source = part.get("path") or part.get("image") or next(images, None)
        if source is None:
            raise InputError(f"{where}: a part of type image has no picture: name one for each in the column images")
        return {"type": "image", "path": _picture(source, Path(config.path).parent, where)}

    result = [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    if next(images, None) is not None:
        raise InputError(
            f"{where}: there are more images than parts of type image in messages: give one for each, name another "
            f"column in columns: {{images: NAME}}, or pass them over with ignore: [{names_of(config, 'images')[0]}]"
        )
    return result


def _picture(source: Any, folder: Path, where: str) -> Any:
    """A picture: its absolute path, its bytes, or the picture itself if a dataset has opened it.

    Args:
        source: one of these with any path, or a mapping with `bytes` and `path`, as datasets store an image.
        folder: the folder at which relative paths begin.
        where: the record's place in the data, for error messages.

    Raises:
        InputError: there is no such file, or the source is something else.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str):
        path = folder / source
        if not path.is_file():
            raise InputError(
                f"{where}: there is no image {path}: give a whole path, or one from the data file's folder on"
            )
        return str(path)
    if source is None or isinstance(source, int | float | list):
        raise InputError(f"{where}: an image is {source!r}: give the path of a picture, or its bytes")
    return source
