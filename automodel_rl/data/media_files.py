"""The files of pictures and audio that a record names, put into the parts of its messages that stand for them."""

from pathlib import Path
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.data.columns import names_of, optional
from automodel_rl.data.messages import MEDIA_PARTS, Message
from automodel_rl.errors import InputError


def with_media_files(
    messages: list[Message], record: dict[str, Any], config: SourceConfig, where: str
) -> list[Message]:
    """The messages, in which every part of type image or audio has its file under the key `path`.

    A part may name its file itself. Otherwise files come from the columns `images` and `audio`, in order. Relative
    paths begin at the data file's folder.

    Raises:
        InputError: there are more parts than files or fewer, or one is no file.
    """
    left = {kind: iter(_listed(optional(record, config, column, where))) for kind, column in MEDIA_PARTS.items()}

    def named(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        if kind not in MEDIA_PARTS:
            return part
        source = part.get("path") or part.get(kind) or next(left[kind], None)
        if source is None:
            raise InputError(
                f"{where}: a part of type {kind} has no file: name one for each in the column {MEDIA_PARTS[kind]}"
            )
        return {"type": kind, "path": _file(kind, source, Path(config.path).parent, where)}

    result = [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    for kind, files in left.items():
        if next(files, None) is not None:
            column = MEDIA_PARTS[kind]
            raise InputError(
                f"{where}: there are more {column} than parts of type {kind} in messages: give one for each, name "
                f"another column in columns: {{{column}: NAME}}, or pass them over with ignore: "
                f"[{names_of(config, column)[0]}]"
            )
    return result


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _file(kind: str, source: Any, folder: Path, where: str) -> Any:
    """A file: its absolute path, its bytes, or a picture itself if a dataset has opened it.

    Args:
        kind: the part's type.
        source: one of these with any path, or a mapping with `bytes` and `path`, as datasets store images and audio.
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
                f"{where}: there is no file {path} of type {kind}: give a whole path, or one from the data file's "
                "folder on"
            )
        return str(path)
    if source is None or isinstance(source, int | float | list):
        raise InputError(f"{where}: a part of type {kind} has {source!r} for file: give its path, or its bytes")
    return source
