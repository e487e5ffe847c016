"""Validation of all records before a run starts."""

import contextlib
import functools
import itertools
from typing import Any

from automodel_rl.config import RunConfig, SourceConfig
from automodel_rl.config.data import Column, SourcesConfig
from automodel_rl.data.columns import MISSING, look_up, names_of
from automodel_rl.data.kinds import kind_of
from automodel_rl.data.messages import Chat, media_parts
from automodel_rl.data.records import READERS, LabelledCompletion, Pair, Reader, Text, chats_of, read_chat, read_example
from automodel_rl.data.sources import RecordSource, open_source
from automodel_rl.data.turn_split import open_examples
from automodel_rl.errors import InputError
from automodel_rl.media.images import check_picture
from automodel_rl.media.videos import Frames

OF_MESSAGES: tuple[Column, ...] = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns that may contain messages."""


def check_data(config: RunConfig) -> list[tuple[Chat, str]]:
    """Reads every record of a run.

    Returns:
        The first chat of each kind (see `kind_of`) with its location. The chat template must render all of them.

    Raises:
        InputError: a record is malformed (with `on_bad_record: drop`, all records of a source are), or a column or key
            named in the config is in no record.
    """
    return check_records(config.data, reader_of(config))


def reader_of(config: RunConfig) -> Reader:
    """Returns the reader of a run's records. It requires an `answer` if a reward compares with it."""
    read = READERS[config.record_type]
    if config.answer_reader is None:
        return read
    return functools.partial(_read_with_answer, read, config.answer_reader)


def check_records(data: SourcesConfig, read: Reader) -> list[tuple[Chat, str]]:
    """Reads every record of all sources. Same result and errors as `check_data`."""
    first: dict[Any, tuple[Chat, str]] = {}
    for config in (*data.train, *data.validation):
        source = open_examples(config, data)
        missing = {(column, name) for column in config.columns for name in names_of(config, column)}
        unseen = {*config.ignore}
        num_good, refused = 0, None
        for number, record in enumerate(source):
            where = source.where(number)
            try:
                held = read(record, config, where)
                _check_pictures(held, where)
            except InputError as error:
                if data.on_bad_record == "stop":
                    raise
                refused = refused or error
                continue
            num_good += 1
            for chat, place in chats_of(held, where):
                first.setdefault(kind_of(chat), (chat, place))
            missing = {pair for pair in missing if look_up(record, pair[1]) is MISSING} if missing else missing
            unseen = unseen - _names(record, config) if unseen else unseen
        if not num_good and refused is not None:
            raise refused
        for column, name in sorted(missing):  # optional columns only: a required one raised at the first record
            raise InputError(
                f"{config.path}: no record has the column {name!r}, which columns name for the {column}: name another, "
                "or remove it"
            )
        for name in sorted(unseen):
            raise InputError(
                f"{config.path}: no record has the column or key {name!r}, which ignore names: name another, or remove "
                "it"
            )
    return [*first.values()]


def _check_pictures(held: Chat | Text | Pair | LabelledCompletion, where: str) -> None:
    """Raises InputError if an image or video frame of a record is damaged."""
    for chat, place in chats_of(held, where):
        for part in media_parts(chat.messages):
            source = part["path"]
            if part["type"] != "audio":
                for picture in source.paths if isinstance(source, Frames) else (source,):
                    check_picture(picture, place)


def holds_chats(config: RunConfig) -> bool:
    """Whether a run's data contain chats, judged by the first record of each source: sft records may be plain texts."""
    if config.record_type != "chats":
        return True
    sources = [(open_source(source), source) for source in (*config.data.train, *config.data.validation)]
    return any(_begins_with_chat(source, of) for source, of in sources)


def _begins_with_chat(source: RecordSource, config: SourceConfig) -> bool:
    """Whether the first readable record is a chat."""
    for number, record in enumerate(source):
        with contextlib.suppress(InputError):  # reported by `check_records`
            return isinstance(read_chat(record, config, source.where(number)), Chat)
    return False


def _read_with_answer(read: Reader, reward: str, record: dict[str, Any], config: SourceConfig, where: str) -> Any:
    answer = read_example(record, config).get("answer")
    if answer is None or answer == "":
        raise InputError(
            f"{where}: no answer, which rewards.function={reward} needs: add one, name its column in columns: "
            "{answer: NAME}, or use another reward"
        )
    return read(record, config, where)


def _names(record: dict[str, Any], config: SourceConfig) -> set[str]:
    """Returns the names of a record's columns and of the keys of its messages."""
    values = (look_up(record, name) for column in OF_MESSAGES for name in names_of(config, column))
    messages = itertools.chain.from_iterable(value for value in values if isinstance(value, list))
    return {*record, *itertools.chain.from_iterable(m for m in messages if isinstance(m, dict))}
