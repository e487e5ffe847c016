"""JSON lines: metrics.jsonl with a record for each step, and files of a step with one for each completion."""

import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_rl.files import write_complete

MEASURED = "val/step"
"""Name of the metric that says of which step a record's validation is, if it may be an earlier one."""


def step_of_metric(record: dict[str, Any], name: str) -> int:
    """The step whose weights a metric of a record is about.

    Args:
        record: a step's metrics.
        name: the metric's name.
    """
    return int(record.get(MEASURED, record["step"]) if name.startswith("val/") else record["step"])


class MetricsFile:
    """Appends a line for each step. When a run resumes, the lines of steps that it runs again are removed.

    Args:
        path: the file.
        first_step: number of steps that were done before; 0 when the run begins.
    """

    def __init__(self, path: Path, first_step: int):
        self.path = path
        # A run that begins measures step 0, the untrained model, again.
        kept = [record for record in read_lines(path) if record["step"] <= first_step] if first_step else []
        write_complete(path, "".join(map(_line, kept)))
        self._waiting: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line. If that fails, as on a full disk, the line waits and is written with the next one."""
        self._waiting.append(_line(record))
        try:
            self._append()
        except OSError as error:
            if len(self._waiting) == 1:
                print(f"warning: {self.path} cannot be written ({error.strerror}); lines wait", file=sys.stderr)

    def _append(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            end = os.fstat(descriptor).st_size
            content = "".join(self._waiting).encode()
            if os.write(descriptor, content) < len(content):
                os.ftruncate(descriptor, end)  # no half lines
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        self._waiting.clear()

    def close(self) -> None:
        """Does nothing: every line that could be written is in the file already."""


def _line(record: dict[str, Any]) -> str:
    """A record as a line of JSON. JSON has no NaN, so numbers that are not finite become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of all complete lines of a file. A run that was killed may have left half a line at the end."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes a file with a line for each record. If the step has run before, its file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_complete(path, "".join(json.dumps(record) + "\n" for record in records))
