"""A place that cannot be written is one line and exit code 2, whatever the command, and nothing is half written."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from automodel_rl.cli import main
from automodel_rl.quickstart.model import train_tokenizer, write_model
from automodel_rl.quickstart.problems import make_problems, write_jsonl
from tests.processes import run_command
from tests.unit.report.runs import make_sft_run

EVERYWHERE = ["file", "file/new", "a" * 300]
NEW = [*EVERYWHERE, "folder", "link", "/proc/new", "/proc/new/new"]
"""Places where nothing new can be made: a file, below it, a name that is too long, what is there, and where nobody may
make files, not even root."""

PLACES = {
    "init": NEW,
    "convert": NEW,
    "quickstart": NEW,
    "export": ["file", "file/new", "folder", "link"],
    "report": ["file/new", "a" * 300, "folder", "/proc/new", "/proc/new/new"],
    "sft": EVERYWHERE,
    "serve": [*EVERYWHERE, "/proc/new"],
}


def commands(folder: Path, place: str) -> dict[str, list[str]]:
    """Commands that write, with the place where they are to."""
    config = {
        "output": place,
        "model": {"path": str(folder / "model")},
        "data": {"train": [{"path": str(folder / "chats.jsonl")}]},
        "batch": {"sequences": 2},
        "length": {"steps": 1},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(config))
    (folder / "serve.yaml").write_text(yaml.safe_dump({"output": place, "model": config["model"], "port": 0}))
    return {
        "init": ["init", "sft", str(folder / "model"), str(folder / "chats.jsonl"), "--out", place],
        "convert": ["convert", str(folder / "trl.yaml"), "--out", place],
        "quickstart": ["quickstart", place],
        "export": ["export", str(folder / "model"), place],
        "report": ["report", str(folder / "run"), "--out", place],
        "sft": ["sft", str(folder / "sft.yaml")],
        "serve": ["serve", str(folder / "serve.yaml")],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    chats, _ = make_problems(8, 0, seed=0)
    write_jsonl(folder / "chats.jsonl", chats)
    write_model(folder / "model", train_tokenizer([m["content"] for c in chats for m in c["messages"]], 300), seed=0)
    make_sft_run(folder / "run")
    (folder / "trl.yaml").write_text("model_name_or_path: some/model")
    (folder / "file").write_text("whole")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("nowhere")
    return folder


@pytest.mark.parametrize(("command", "place"), [(name, place) for name, places in PLACES.items() for place in places])
def test_a_place_that_cannot_be_written_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, place: str
) -> None:
    arguments = commands(folder, place)[command]
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(folder)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert place in line or "is not a path" in line
    assert sorted(folder.rglob("*")) == before
    assert (folder / "file").read_text() == "whole"


@pytest.mark.parametrize(("command", "place"), [("init", "a/b/new.yaml"), ("report", "a/b/new.html")])
def test_folders_above_a_new_file_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    monkeypatch.chdir(folder)
    assert main(commands(folder, place)[command]) == 0
    assert (folder / place).is_file()


@pytest.mark.parametrize("arguments", [["completion", "bash"], ["--version"]], ids=["much", "little"])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "automodel_rl", *arguments]
    with open("/dev/full", "w") as full:
        done = run_command(command, stdout=full)
    assert done.returncode == 2
    assert done.stderr == (
        "error: standard output cannot be written (No space left on device): make room, or choose another place\n"
    )


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as pipe:
        done = run_command([sys.executable, "-m", "automodel_rl", "completion", "bash"], stdout=pipe)
    assert (done.returncode, done.stderr) == (1, "")
