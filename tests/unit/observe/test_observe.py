"""Metrics, report and run directory."""

import json
from pathlib import Path

import pytest

from automodel_rl.config import SFTConfig
from automodel_rl.errors import InputError
from automodel_rl.observe.metrics import MetricsFile, read_metrics
from automodel_rl.observe.report import Sample, write_report
from automodel_rl.observe.run_directory import RunDirectory


def make_config(output: Path, **changes: object) -> SFTConfig:
    values = {
        "output": str(output),
        "model": {"path": "m"},
        "data": {"train": [{"path": "a.jsonl"}]},
        "batch": {"sequences": 8, "row_tokens": 64},
        "length": {"steps": 3},
    }
    return SFTConfig.model_validate(values | changes)


def test_metrics_of_steps_that_run_again_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in (1, 2, 3):
        metrics.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 4, "tra')  # a killed run
    MetricsFile(path, 2).write({"step": 3, "again": True})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_the_report_is_one_page_that_shows_curves_and_escapes_samples(tmp_path: Path) -> None:
    rows = [{"step": i, "train/loss": 3.0 / i, "perf/tokens_per_second": 100.0 * i} for i in (1, 2, 3)]
    write_report(tmp_path / "report.html", "a run", rows, [Sample("<b>2+2</b>", "4", "four")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == 2
    assert "&lt;b&gt;2+2&lt;/b&gt;" in page
    assert "http" not in page
    assert "src=" not in page


def test_a_loss_that_is_not_finite_does_not_break_the_report(tmp_path: Path) -> None:
    rows = [{"step": 1, "train/loss": float("nan")}, {"step": 2, "train/loss": 1.0}]
    write_report(tmp_path / "report.html", "a run", rows, [])
    assert "nan" not in (tmp_path / "report.html").read_text().split("<h2>Last step")[0]


def test_a_folder_is_used_by_its_own_run_only(tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = make_config(output)
    RunDirectory(config, str(output), resume="never").create()
    with pytest.raises(InputError, match="holds this run already: add --resume auto"):
        RunDirectory(config, str(output), resume="never")
    changed = make_config(output, length={"steps": 9}, observe={"trackers": ["tensorboard"]})
    RunDirectory(changed, str(output), resume="auto")
    for resume in ("auto", "never"):
        with pytest.raises(InputError, match=r"holds another run \(it differs in seed\)"):
            RunDirectory(make_config(output, seed=5), str(output), resume)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds files that are not a run's"):
        RunDirectory(make_config(tmp_path), str(tmp_path), resume="never")


def test_metrics_are_json_lines_in_which_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    row = {"step": 1, "perf/mfu": None, "train/loss": float("nan"), "train/grad_norm": float("inf")}
    MetricsFile(tmp_path / "m.jsonl", 0).write(row)
    written = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert written == {"step": 1, "perf/mfu": None, "train/loss": None, "train/grad_norm": None}
