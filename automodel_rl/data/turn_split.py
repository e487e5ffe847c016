"""Splitting of chats into one example per trained turn, for templates that render a turn differently once others
follow."""

import bisect
import itertools
from collections.abc import Iterator
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import DataConfig, SourcesConfig
from automodel_rl.data.columns import MISSING, look_up, names_of
from automodel_rl.data.media_files import listed
from automodel_rl.data.messages import MEDIA_PARTS, SHAREGPT_ROLES, media_parts
from automodel_rl.data.sources import RecordSource, open_source


def open_examples(config: SourceConfig, data: SourcesConfig) -> RecordSource:
    """Opens a source, with its chats split into turns if `data` says so."""
    source = open_source(config)
    return SplitTurns(source, config) if isinstance(data, DataConfig) and data.turns == "split" else source


class SplitTurns:
    """A source in which a chat of n trained turns becomes n records, each truncated after its turn, the only one that
    is trained. All records are read once on construction."""

    def __init__(self, source: RecordSource, config: SourceConfig):
        self.source, self.config = source, config
        self.starts = [0, *itertools.accumulate(max(1, len(self._turns(record))) for record in source)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        place, turn = self._find(number)
        return self._until(self.source[place], turn)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record in self.source:
            yield from (self._until(record, turn) for turn in range(max(1, len(self._turns(record)))))

    def where(self, number: int) -> str:
        return self.source.where(self._find(number)[0])

    def _find(self, number: int) -> tuple[int, int]:
        """Returns the record index of an example, and the index of its trained turn among those of the record."""
        place = bisect.bisect_right(self.starts, number) - 1
        return place, number - self.starts[place]

    def _messages(self, record: dict[str, Any]) -> tuple[str, list[Any]]:
        """Returns the name and value of the messages column; [] if the record has no messages."""
        name = names_of(self.config, "messages")[0]
        value = look_up(record, name)
        return name, value if value is not MISSING and isinstance(value, list) else []

    def _turns(self, record: dict[str, Any]) -> list[int]:
        _, messages = self._messages(record)
        return [place for place, message in enumerate(messages) if _is_answer(message) and message.get("weight") != 0]

    def _until(self, record: dict[str, Any], turn: int) -> dict[str, Any]:
        turns = self._turns(record)
        if not turns:
            return record
        name, messages = self._messages(record)
        *earlier, last = messages[: turns[turn] + 1]
        kept = [{**message, "weight": 0} if _is_answer(message) else message for message in earlier]
        return _with_value(self._with_media_of(record, [*earlier, last]), name, [*kept, last])

    def _with_media_of(self, record: dict[str, Any], messages: list[Any]) -> dict[str, Any]:
        """Removes files from the record's columns that belong to parts after the given messages."""
        parts = media_parts([message for message in messages if isinstance(message, dict)])
        for kind, column in MEDIA_PARTS.items():
            name = names_of(self.config, column)[0]
            if (files := look_up(record, name)) not in (MISSING, None):
                unnamed = [p for p in parts if p["type"] == kind and not (p.get("path") or p.get(kind))]
                record = _with_value(record, name, listed(kind, files)[: len(unnamed)])
        return record


def _is_answer(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return "assistant" in (message.get("role"), SHAREGPT_ROLES.get(str(message.get("from"))))


def _with_value(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Returns the record with a replaced value, possibly nested in a column."""
    if name in record or "." not in name:
        return {**record, name: value}
    column, _, rest = name.partition(".")
    return {**record, column: _with_value(record[column], rest, value)}
