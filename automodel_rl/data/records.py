"""Reading of records: a record holds a chat, a pair of completions, or a prompt. Columns are named as in TRL."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_rl.config import DPOConfig, GRPOConfig, RunConfig, SFTConfig, SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.config.rollout import NEED_ANSWER
from automodel_rl.data.kinds import kind_of
from automodel_rl.data.messages import Chat, Message, checked_messages, checked_tools
from automodel_rl.data.sources import open_source
from automodel_rl.errors import InputError


@dataclass(frozen=True)
class Pair:
    """A prompt with a better completion, and the same prompt with a worse one."""

    chosen: Chat
    rejected: Chat


OF_MESSAGES: tuple[Column, ...] = ("messages", "prompt", "chosen", "rejected")
"""Columns that hold messages."""

Reader = Callable[[dict[str, Any], SourceConfig, str], Chat | Pair]
"""A function that reads a record. Its arguments are the record, its source's config, and its place in the data."""


def read_chat(record: dict[str, Any], config: SourceConfig, where: str) -> Chat:
    """The chat of a record.

    Raises:
        InputError: there are no messages, no turn of the assistant, or no trained turn.
    """
    messages = _messages(record, config, "messages", where)
    messages = _with_images(messages, record, config, where)
    chat = Chat(messages, _tools(record, config, where))
    if not chat.turns:
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise InputError(f"{where}: no assistant turn to learn from, roles are {roles}: add one or remove the record")
    return _with_trained(chat, where)


def _with_trained(chat: Chat, where: str) -> Chat:
    if not chat.trained:
        raise InputError(f"{where}: all turns of the assistant have weight 0: give one weight 1, or remove the record")
    return chat


def _with_images(messages: list[Message], record: dict[str, Any], config: SourceConfig, where: str) -> list[Message]:
    """The messages, in which every part of type image has its picture under the key `path`.

    A part may name its picture itself. Otherwise pictures come from the column `images`, in order. Relative paths begin
    at the data file's folder.
    """
    images, name = _optional(record, config, "images")
    images = iter([] if images is None else images if isinstance(images, list) else [images])

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
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
            f"{where}: there are more images than parts of type image in messages: give one for each, name another "
            f"column in columns: {{images: NAME}}, or pass them over with ignore: [{name}]"
        )
    return found


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


def read_pair(record: dict[str, Any], config: SourceConfig, where: str) -> Pair:
    """The pair of a record, from its columns prompt, chosen and rejected. Each holds messages or a text.

    Raises:
        InputError: a column is missing, or a completion does not end with a turn of the assistant that is trained.
    """
    prompt = _messages(record, config, "prompt", where, role="user")
    tools = _tools(record, config, where)
    columns: tuple[Column, Column] = ("chosen", "rejected")
    chats = []
    for name in columns:
        messages = _messages(record, config, name, where, role="assistant")
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must end with a turn of the assistant: add one or remove the record")
        chats.append(_with_trained(Chat([*prompt, *messages], tools, start=len(prompt)), f"{where}, {name}"))
    return Pair(*chats)


def read_prompt(record: dict[str, Any], config: SourceConfig, where: str) -> Chat:
    """The prompt of a record, from messages or a text.

    Raises:
        InputError: the prompt is missing or empty, or its last turn is the assistant's.
    """
    prompt = _messages(record, config, "prompt", where, role="user")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise InputError(f"{where}: prompt must end with a turn that the assistant can answer")
    return Chat(prompt, _tools(record, config, where), start=len(prompt))


def _tools(record: dict[str, Any], config: SourceConfig, where: str) -> tuple[dict[str, Any], ...]:
    return checked_tools(*_optional(record, config, "tools"), where)


def read_example(record: dict[str, Any], config: SourceConfig) -> dict[str, Any]:
    """The record with the package's own names for its columns, as reward functions get it."""
    return {**record, **{column: record[name] for column, name in config.columns.items() if name in record}}


def check_data(config: RunConfig) -> list[tuple[Chat, str]]:
    """Reads every record of a run, so that a wrong record is found before anything starts.

    Returns:
        The first chat of each kind, with its place in the data. The chat template must be able to write all of them.

    Raises:
        InputError: a record is wrong, or no record has a column or key that the config names.
    """
    if isinstance(config, GRPOConfig):
        needs_answer = next((r.function for r in config.rewards if r.function in NEED_ANSWER), None)
        read: Reader = functools.partial(_read_prompt_with_answer, needs_answer) if needs_answer else read_prompt
        return check_records([*config.data.train, *config.data.validation], read)
    if isinstance(config, DPOConfig):
        return check_records([*config.data.train, *config.data.validation], read_pair)
    if isinstance(config, SFTConfig):
        return check_records([*config.data.train, *config.data.validation], read_chat)
    return []


def check_records(sources: Sequence[SourceConfig], read: Reader) -> list[tuple[Chat, str]]:
    """Reads every record of some sources. It returns and raises the same as `check_data`."""
    first: dict[Any, tuple[Chat, str]] = {}
    for config in sources:
        source = open_source(config)
        missing, unseen = dict(config.columns), {*config.ignore}
        for number, record in enumerate(source):
            where = source.where(number)
            for chat, place in chats_of(read(record, config, where), where):
                first.setdefault(kind_of(chat), (chat, place))
            missing = {column: name for column, name in missing.items() if name not in record}
            unseen = unseen - _names(record, config) if unseen else unseen
        for column, name in missing.items():  # only optional columns: a required one has raised at the first record
            raise InputError(
                f"{config.path}: no record has the column {name!r}, which columns name for the {column}: name another, "
                "or leave it out"
            )
        for name in sorted(unseen):
            raise InputError(
                f"{config.path}: no record has the column or key {name!r}, which ignore names: name another, or leave "
                "it out"
            )
    return [*first.values()]


def chats_of(held: Chat | Pair, where: str) -> list[tuple[Chat, str]]:
    """The chats of a record, one or two, each with its place in the data."""
    if isinstance(held, Chat):
        return [(held, where)]
    return [(held.chosen, f"{where}, chosen"), (held.rejected, f"{where}, rejected")]


def _read_prompt_with_answer(reward: str, record: dict[str, Any], config: SourceConfig, where: str) -> Chat:
    answer = read_example(record, config).get("answer")
    if answer is None or answer == "":
        raise InputError(
            f"{where}: no answer, which rewards.function={reward} compares with: add one, name its column in columns: "
            "{answer: NAME}, or use another reward"
        )
    return read_prompt(record, config, where)


def _messages(
    record: dict[str, Any], config: SourceConfig, column: Column, where: str, role: str | None = None
) -> list[Message]:
    """The messages of a column, without the keys that the source's config ignores."""
    value = _column(record, config, column, where)
    if isinstance(value, list):
        value = [{k: v for k, v in m.items() if k not in config.ignore} if isinstance(m, dict) else m for m in value]
    return checked_messages(value, column, where, role)


def _names(record: dict[str, Any], config: SourceConfig) -> set[str]:
    """Names of a record's columns, and of the keys of its messages."""
    values = (record.get(config.columns.get(column, column)) for column in OF_MESSAGES)
    messages = itertools.chain.from_iterable(value for value in values if isinstance(value, list))
    return {*record, *itertools.chain.from_iterable(m for m in messages if isinstance(m, dict))}


def _optional(record: dict[str, Any], config: SourceConfig, column: Column) -> tuple[Any, str]:
    """The value of a column, None if it is missing or ignored, and the column's name in the data."""
    name = config.columns.get(column, column)
    return None if name in config.ignore else record.get(name), name


def _column(record: dict[str, Any], config: SourceConfig, column: Column, where: str) -> Any:
    name = config.columns.get(column, column)
    if name in config.ignore:
        raise InputError(f"{where}: ignore names the column {name!r}, which is needed: leave it out")
    if name not in record:
        raise InputError(
            f"{where}: no column {name!r}, only {', '.join(record) or 'none'}: name the column of the {column} in "
            f"columns: {{{column}: NAME}}"
        )
    return record[name]
