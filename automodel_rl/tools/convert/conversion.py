"""A config in the making: keys here, with the foreign settings they come from."""

from dataclasses import dataclass, field
from typing import Any

from automodel_rl.tools.convert.foreign_run import ForeignRun


@dataclass
class Conversion:
    """A config in the making.

    Attributes:
        run: what is converted.
        values: values by dotted key here.
        sources: for each key, the foreign setting that it comes from; empty if it comes from several.
        left_out: reasons, by foreign setting.
        notes: what to look at before a run.
        used: foreign settings that have been converted.
    """

    run: ForeignRun
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def put(self, key: str, value: Any, source: str) -> None:
        """Sets a key here."""
        self.values[key], self.sources[key] = value, source

    def take(self, *names: str) -> Any:
        """Returns the first of these foreign settings that has a value, None without any. All of them count as used."""
        self.used |= {*names}
        given = (self.run.settings.get(name) for name in names)
        return next((value for value in given if value not in (None, "")), None)
