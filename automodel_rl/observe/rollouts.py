"""What was generated in a step, as JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_rl.files import write_complete


def save_rollouts(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes one object a completion; a file that is there, of a step that runs again, is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_complete(path, "".join(json.dumps(record) + "\n" for record in records))
