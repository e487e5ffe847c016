"""Assignment of a record's image, video and audio files to the parts of its messages."""

from pathlib import Path
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.data.columns import names_of, optional
from automodel_rl.data.messages import MEDIA_PARTS, Message
from automodel_rl.errors import InputError
from automodel_rl.media.videos import Frames

DEFAULT_FPS = 2.0
"""Default frames per second of videos, as in Qwen's processors."""


FOREIGN_COLUMNS: dict[str, Column] = {
    **dict.fromkeys(("image", "image_path", "image_paths", "image_file"), "images"),
    **dict.fromkeys(("video", "video_path", "video_paths", "video_file"), "videos"),
    **dict.fromkeys(("audios", "audio_path", "audio_paths", "audio_file"), "audio"),
}
"""Media columns of other tools, such as LLaVA, with their names here."""

RUN_ONLY = "chat_template_kwargs"
"""Column with per-record chat template variables, as in TRL. Here, variables apply to the whole run."""


def _check_elsewhere(record: dict[str, Any], config: SourceConfig, where: str) -> None:
    """Raises InputError for a column that other tools use and that would be silently ignored here."""
    named = {name.partition(".")[0] for column in config.columns for name in names_of(config, column)}
    for name in (FOREIGN_COLUMNS.keys() | {RUN_ONLY}) & record.keys() - {*config.ignore} - named:
        value = record[name]
        if value is None or value == [] or value == {} or value == "":
            continue
        if name == RUN_ONLY:
            raise InputError(
                f"{where}: has {name}, which other tools read for each record: set data.{name} for the whole run, or "
                f"skip it with ignore: [{name}]"
            )
        raise InputError(
            f"{where}: has {name}, which other tools read: name it in columns: {{{FOREIGN_COLUMNS[name]}: {name}}}, "
            f"with a part of type {FOREIGN_COLUMNS[name].removesuffix('s')} in messages at its position, or skip it "
            f"with ignore: [{name}]"
        )


def with_media_files(
    messages: list[Message], record: dict[str, Any], config: SourceConfig, where: str
) -> list[Message]:
    """Returns the messages with the file, or `Frames`, of every image, video and audio part under its key `path`.

    A part may name its file itself. Otherwise files are taken in order from the columns `images`, `videos` and `audio`.
    Relative paths start at the data file's folder. Raises InputError if parts and files do not match, a file does not
    exist, or a column has the name of another tool.
    """
    _check_elsewhere(record, config, where)
    left = {kind: iter(listed(kind, optional(record, config, column, where))) for kind, column in MEDIA_PARTS.items()}

    def named(part: dict[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        if kind not in MEDIA_PARTS:
            return part
        source = part.get("path") or part.get(kind) or next(left[kind], None)
        if source is None:
            raise InputError(
                f"{where}: a part of type {kind} has no file: name one in the part as path, or one for each in the "
                f"column {MEDIA_PARTS[kind]}"
            )
        folder = Path(config.path).parent
        if kind == "video":
            return {"type": kind, "path": _frames(source, part.get("fps"), folder, where)}
        return {"type": kind, "path": _file(kind, source, folder, where)}

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
                f"{where}: more {column} than parts of type {kind} in messages: add a part for each (a text such as "
                f"<{kind}> is not a part), name another column in columns: {{{column}: NAME}}, or skip them with "
                f"ignore: [{names_of(config, column)[0]}]"
            )
    return result


def listed(kind: str, value: Any) -> list[Any]:
    """Returns the files of a column that holds a list or a single file."""
    if value is None:
        return []
    is_one = not isinstance(value, list) or (kind == "video" and all(isinstance(frame, str) for frame in value))
    return [value] if is_one and value != [] else value


def _frames(source: Any, fps: Any, folder: Path, where: str) -> Frames:
    """Returns a video's frames from a list of files, or from a mapping with `frames` and optionally `fps`."""
    if isinstance(source, dict):
        fps, source = source.get("fps", fps), source.get("frames")
    if not isinstance(source, list) or not source:
        raise InputError(
            f"{where}: a part of type video has {source!r:.60} for frames: use a list of images, such as from ffmpeg "
            "-i VIDEO -vf fps=2 %04d.jpg, and their number per second as fps"
        )
    fps = DEFAULT_FPS if fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or fps <= 0:
        raise InputError(
            f"{where}: a part of type video has fps {fps!r}: set it to the frames per second, a number above 0"
        )
    return Frames(tuple(_file("video", frame, folder, where) for frame in source), float(fps))


def _file(kind: str, source: Any, folder: Path, where: str) -> Any:
    """Returns a file as absolute path, bytes, or an image that a dataset has opened. `source` may also be a mapping
    with `bytes` and `path`, as in datasets. Relative paths start at `folder`."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str):
        path = folder / source
        if not path.is_file():
            raise InputError(
                f"{where}: no file {path} of type {kind}: use an absolute path, or one relative to the data file's "
                "folder"
            )
        return str(path)
    if source is None or isinstance(source, int | float | list):
        raise InputError(f"{where}: a part of type {kind} has {source!r} for file: use its path, or its bytes")
    return source
