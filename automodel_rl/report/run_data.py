"""Data of a run for the page, read from the run's folder alone, whatever the run's state."""

import json
from pathlib import Path
from typing import Any

from automodel_rl.config.strict_yaml import read_yaml
from automodel_rl.errors import InputError
from automodel_rl.observe.metrics import MEASURED, read_lines, step_of_metric
from automodel_rl.observe.run_files import RunFiles, read_number
from automodel_rl.report.rollouts import groups_of, spread

MAX_POINTS = 1500
"""Maximum number of points of a curve. Longer curves keep the first, lowest and highest point of each bin."""

STEPS_WITH_ROLLOUTS = 8
"""Number of steps whose completions a page includes, spread over the run."""


def read_run(folder: Path, *, status: str | None = None, rollouts: bool = True) -> dict[str, Any]:
    """Returns a run as JSON-compatible values.

    Args:
        status: the status, if the caller knows it; None to determine it from the files.
        rollouts: whether to include completions and timelines of some steps, for a page without a server.

    Raises:
        InputError: the folder holds no run.
    """
    files = RunFiles(folder)
    if not files.config_file.is_file():
        raise InputError(f"{folder}: does not hold a run: pass the output folder of one, with its config.yaml")
    config = read_yaml(files.config_file)
    records = read_lines(files.metrics)
    step = records[-1]["step"] if records else 0
    total = read_number(files.total_steps_file) or config["length"].get("steps")
    failure = _text(files.failure)
    steps = _steps_of(files.rollouts)
    chosen = spread(steps, STEPS_WITH_ROLLOUTS) if rollouts else []
    timed = _steps_of(files.timelines)
    chosen_timed = spread(timed, STEPS_WITH_ROLLOUTS) if rollouts else []
    return {
        "name": folder.absolute().name,
        "folder": str(folder),
        "title": f"{config['algorithm'].upper()} of {config['model']['path']}",
        "algorithm": config["algorithm"],
        "status": status or _status(files, failure, step),
        "failure": failure,
        "phase": _text(files.phase),
        "step": step,
        "total_steps": total,
        "config": files.config_file.read_text(),
        "settings": dotted(config),
        "versions": json.loads(_text(files.versions) or "{}"),
        "series": _series(records),
        "samples": _newest_of(files.samples),
        "examples": _newest_of(files.examples),
        "steps_with_rollouts": steps if not rollouts else chosen,
        "steps_with_timelines": timed if not rollouts else chosen_timed,
        "timelines": {number: read_lines(files.timelines / f"step_{number}.jsonl") for number in chosen_timed},
        "rollouts": {number: groups_of(files.rollouts / f"step_{number}.jsonl") for number in chosen},
    }


def dotted(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Flattens a config into dotted keys. `before` is the prefix of the section's keys, with a trailing dot."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= dotted(value, f"{before}{name}.") if isinstance(value, dict) and value else {f"{before}{name}": value}
    return found


def _status(files: RunFiles, failure: str, step: int) -> str:
    if files.is_in_use():
        return "running"
    if files.finished_after is not None and files.finished_after >= step:
        return "finished"
    if failure:
        return "stopped" if failure.startswith(("stopped by", "interrupted")) else "failed"
    return "stopped"


def _series(records: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", MEASURED))
    series: dict[str, list[list[float]]] = {}
    for name in names:
        points = [(step_of_metric(r, name), r[name]) for r in records if isinstance(r.get(name), int | float)]
        if points:
            kept = thinned(points, MAX_POINTS)
            series[name] = [[step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]]
    return series


def thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Keeps the first, lowest and highest point of each bin, so that no peak is lost. Returns about `most` points."""
    if len(points) <= most:
        return points
    size = -(-len(points) * 3 // most)
    kept = []
    for start in range(0, len(points), size):
        bin_ = points[start : start + size]
        kept += sorted({bin_[0], min(bin_, key=lambda p: p[1]), max(bin_, key=lambda p: p[1])})
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _newest_of(folder: Path) -> list[dict[str, Any]]:
    steps = _steps_of(folder)
    if not steps:
        return []
    return [{"step": steps[-1], **record} for record in read_lines(folder / f"step_{steps[-1]}.jsonl")]


def _steps_of(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("step_") for path in folder.glob("step_*.jsonl")]
    return sorted(int(name) for name in names if name.isdecimal())


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""
