"""`doctor` says what is there, what is missing for what, and what brings it."""

import subprocess
import sys
from pathlib import Path

import pytest

from automodel_rl.cli import main
from automodel_rl.tools import doctor
from tests.pages import ROOT
from tests.vllm_environment import PYTHON, needs_vllm


def test_every_extra_is_looked_at() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    extras = {line.partition(" =")[0] for line in table.splitlines() if line[:1].isalpha() and " = [" in line}
    assert extras - {"dev"} == {*doctor.EXTRAS}


def test_a_sound_installation_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "no GPU: " in said or "GPU 0: " in said
    assert "tested with 2.11.0, 2.13.0, 2.15.0" in said
    assert "automodel-rl doctor --vllm PYTHON" in said


def test_a_package_that_is_found_by_its_path_alone_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_found", lambda package: None)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "automodel-rl (not installed in this interpreter, only found by its path), Python 3" in said
    assert "no GPU: " in said or "GPU 0: " in said
    assert "to install it with its dependencies: pip install automodel-rl, or pip install -e . in its folder" in said


def test_what_is_missing_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor._found
    versions = {"torch": "2.9.0", "ray": None, "math-verify": None}
    monkeypatch.setattr(doctor, "_found", lambda package: versions.get(package, found(package)))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "  torch 2.9.0: required: <2.16,>=2.11" in said
    assert "  math-verify is missing: required: >=0.9" in said
    assert "to repair it: pip install --upgrade automodel-rl 'math-verify>=0.9' 'torch<2.16,>=2.11'" in said
    assert "  ray    --launcher ray: needs ray>=2.50" in said
    (line,) = (line for line in said.splitlines() if line.startswith("to install all of it: "))
    assert "ray" in line


def test_an_environment_without_vllm_is_told_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(tmp_path / "empty")], check=True)
    python = tmp_path / "empty" / "bin" / "python"
    assert main(["doctor", "--vllm", str(python)]) == 0
    assert f"{python} cannot import it (ModuleNotFoundError: " in capsys.readouterr().out
    assert main(["doctor", "--vllm", str(tmp_path / "none")]) == 2
    assert main(["doctor", "more"]) == 2


@needs_vllm
def test_an_environment_with_vllm_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--vllm", str(PYTHON)]) == 0
    assert "0.32.0 with torch 2." in capsys.readouterr().out
