"""The package as a whole: public names, light imports, and a README that tells the truth."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import automodel_rl
from automodel_rl.parallel.combinations import table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", automodel_rl.__all__)
def test_public_names_can_be_imported_and_have_docstrings(name: str) -> None:
    assert getattr(automodel_rl, name).__doc__


def test_help_answers_in_under_a_second_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "automodel_rl", "--help"]
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 1.0
    assert "usage: automodel-rl sft" in result.stdout
    assert not any(line.endswith((" torch", " numpy", " transformers")) for line in result.stderr.splitlines())


def test_readme_has_the_table_of_supported_combinations() -> None:
    assert table() in (ROOT / "README.md").read_text()


def test_readme_names_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    for package in sorted((ROOT / "automodel_rl").glob("*/__init__.py")):
        assert f"{package.parent.name}/" in readme
