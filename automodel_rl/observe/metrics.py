"""JSON Lines files: metrics.jsonl with a record per step, and files per step with a record per completion."""

import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_rl.files import write_atomic

MEASURED = "val/step"
"""Metric with the step of a record's validation, which may be earlier than the record's step."""


def step_of_metric(record: dict[str, Any], name: str) -> int:
    return int(record.get(MEASURED, record["step"]) if name.startswith("val/") else record["step"])


class MetricsFile:
    """Appends a line per step. On resuming, lines of steps that will run again are removed.

    Args:
        first_step: number of steps done before; 0 for a new run.
    """

    def __init__(self, path: Path, first_step: int):
        self.path = path
        # A new run measures step 0, the untrained model, again.
        kept = [record for record in read_lines(path) if record["step"] <= first_step] if first_step else []
        write_atomic(path, "".join(map(_line, kept)))
        self._waiting: list[str] = []

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line. If that fails, as on a full disk, keeps the line and writes it with the next one."""
        self._waiting.append(_line(record))
        try:
            self._append()
        except OSError as error:
            if len(self._waiting) == 1:
                print(f"warning: {self.path} cannot be written ({error.strerror}); lines are buffered", file=sys.stderr)

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
        """Does nothing: lines are written immediately."""


def _line(record: dict[str, Any]) -> str:
    """Encodes a record as a line of JSON, with null for non-finite numbers."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of all complete lines. A killed run may have left a partial line at the end."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes a file with a line per record, replacing that of an earlier attempt at the step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in records))
