"""What a record must hold: a chat, a pair of completions, or a prompt. Columns are named as in TRL."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_rl.config import DPOConfig, GRPOConfig, RunConfig, SFTConfig, SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.config.rollout import NEED_ANSWER
from automodel_rl.data.sources import open_source
from automodel_rl.errors import InputError

Message = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse completion, as messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


Reader = Callable[[dict[str, Any], SourceConfig, str], Any]
"""(record, its source's config, where it is) -> what the record holds."""


def read_chat(record: dict[str, Any], config: SourceConfig, where: str) -> list[Message]:
    """The chat of a record.

    Raises:
        InputError: no messages, or none by the assistant.
    """
    messages = _messages(_column(record, config, "messages", where), "messages", where)
    messages = _with_images(messages, record, config, where)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(str(message["role"]) for message in messages) or "none"
        raise InputError(f"{where}: no assistant turn to learn from, roles are {roles}: add one or remove the record")
    return messages


def _with_images(messages: list[Message], record: dict[str, Any], config: SourceConfig, where: str) -> list[Message]:
    """The messages with the path of its picture in every part of type image: of the column `images`, in order, or what
    the part has itself. Paths that are not whole begin at the data file's folder."""
    images = record.get(config.columns.get("images", "images"))
    images = iter([] if images is None else images if isinstance(images, list) else [images])

    def named(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            return part
        if kind != "image":
            raise InputError(f"{where}: a part of content has type {kind!r}: use parts of type text and image only")
        source = part.get("path") or part.get("image") or next(images, None)
        if source is None:
            raise InputError(f"{where}: a part of type image has no picture: name one for each in the column images")
        return {"type": "image", "path": _picture(source, Path(config.path).parent, where)}

    found = [
        {**message, "content": [named(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    if next(images, None) is not None:
        raise InputError(
            f"{where}: there are more images than parts of type image in messages: give one for each, or name another "
            "column in columns: {images: NAME}"
        )
    return found


def _picture(source: Any, folder: Path, where: str) -> Any:
    """A picture's whole path, its bytes, or a picture that a dataset has opened.

    Args:
        source: one of these, or what datasets make of an image: its `bytes` and its `path`.
        folder: where paths begin that are not whole.
        where: in the data, for messages.
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


def read_pair(record: dict[str, Any], config: SourceConfig, where: str) -> Pair:
    """Prompt, chosen and rejected of a record, each messages or a text.

    Raises:
        InputError: one is missing, or a completion does not end with the assistant.
    """
    prompt = _messages(_column(record, config, "prompt", where), "prompt", where, role="user")
    completions = []
    for name in ("chosen", "rejected"):
        column: Any = name
        messages = _messages(_column(record, config, column, where), name, where, role="assistant")
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must end with a turn of the assistant: add one or remove the record")
        completions.append(messages)
    return Pair(prompt, *completions)


def read_prompt(record: dict[str, Any], config: SourceConfig, where: str) -> list[Message]:
    """The prompt of a record, messages or a text.

    Raises:
        InputError: it is missing or empty, or the assistant spoke last.
    """
    prompt = _messages(_column(record, config, "prompt", where), "prompt", where, role="user")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise InputError(f"{where}: prompt must end with a turn that the assistant can answer")
    return prompt


def read_example(record: dict[str, Any], config: SourceConfig) -> dict[str, Any]:
    """The record with the package's own names for its columns, as reward functions get it."""
    return {**record, **{column: record[name] for column, name in config.columns.items() if name in record}}


def check_data(config: RunConfig) -> None:
    """Reads every record of a run, so that bad ones are known before anything starts."""
    if isinstance(config, GRPOConfig):
        needs_answer = next((r.function for r in config.rewards if r.function in NEED_ANSWER), None)
        read: Reader = functools.partial(_read_prompt_with_answer, needs_answer) if needs_answer else read_prompt
        check_records([*config.data.train, *config.data.validation], read)
    elif isinstance(config, DPOConfig):
        check_records([*config.data.train, *config.data.validation], read_pair)
    elif isinstance(config, SFTConfig):
        check_records([*config.data.train, *config.data.validation], read_chat)


def check_records(sources: Sequence[SourceConfig], read: Reader) -> None:
    """Reads every record of some sources."""
    for config in sources:
        source = open_source(config)
        for number, record in enumerate(source):
            read(record, config, source.where(number))


def _read_prompt_with_answer(reward: str, record: dict[str, Any], config: SourceConfig, where: str) -> list[Message]:
    answer = read_example(record, config).get("answer")
    if answer is None or answer == "":
        raise InputError(
            f"{where}: no answer, which rewards.function={reward} compares with: add one, name its column in columns: "
            "{answer: NAME}, or use another reward"
        )
    return read_prompt(record, config, where)


def _column(record: dict[str, Any], config: SourceConfig, column: Column, where: str) -> Any:
    name = config.columns.get(column, column)
    if name not in record:
        raise InputError(
            f"{where}: no column {name!r}, only {', '.join(record) or 'none'}: name the column of the {column} in "
            f"columns: {{{column}: NAME}}"
        )
    return record[name]


def _messages(value: Any, column: str, where: str, role: str | None = None) -> list[Message]:
    """Checked messages; a text is one message by `role`, where texts are allowed."""
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m for m in value):
        text = "" if role is None else "a text or "
        raise InputError(f"{where}: {column} must be {text}a list of objects with role and content")
    for turn, message in enumerate(value):
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise InputError(f"{where}: turn {turn} has no text in content, only {json.dumps(message)[:80]}")
    return value
