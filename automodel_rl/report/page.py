"""The report as one self-contained HTML file."""

import json
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from automodel_rl.files import write_atomic
from automodel_rl.report.run_data import read_run

SCRIPTS = ("charts.js", "steps.js", "samples.js", "timeline.js", "summary.js", "page.js")


def write_report(path: Path, folders: Sequence[Path], status: str | None = None) -> None:
    """Writes the page of one or several runs.

    Args:
        status: the status of a run that writes its own page, which must not open its own lock file: closing it would
            release the lock.

    Raises:
        InputError: a folder holds no run.
    """
    data = {"written": time.time(), "runs": [read_run(folder, status=status) for folder in folders]}
    write_atomic(path, page(data))


def page(data: dict[str, Any] | None) -> str:
    """Returns the page's HTML. With `data` None, the page fetches its data from the server."""
    parts = {
        "STYLE": _static("page.css"),
        "PLOTLY": plotly(),
        "SCRIPTS": "\n".join(_static(name) for name in SCRIPTS),
        # Text in the data must not close the script element.
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    }
    head, *rest = _static("page.html").split("@@")
    return head + "".join(parts[text] if number % 2 == 0 else text for number, text in enumerate(rest))


@cache
def plotly() -> str:
    return (files("plotly") / "package_data" / "plotly.min.js").read_text()


def stylesheet() -> str:
    return _static("page.css")


@cache
def _static(name: str) -> str:
    return (files("automodel_rl.report") / "static" / name).read_text()
