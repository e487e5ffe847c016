"""The package as a whole: its public names, and imports that are light and silent."""

import resource
import subprocess
import sys

import pytest

import automodel_rl


def test_public_names_are_listed_and_others_unknown() -> None:
    assert set(automodel_rl.__all__) <= set(dir(automodel_rl))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        automodel_rl.nonsense  # noqa: B018


def test_help_needs_no_torch_and_less_than_half_of_its_processor_time() -> None:
    """About 0.7 of 2.2 seconds on an idle machine. A loaded one takes longer for both."""
    arguments = ["-m", "automodel_rl", "--help"]
    commands = {"help": [sys.executable, *arguments], "torch": [sys.executable, "-c", "import torch"]}
    seconds = {name: min(processor_seconds(command) for _ in range(2)) for name, command in commands.items()}
    assert seconds["help"] < 0.5 * seconds["torch"]
    traced = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(traced, capture_output=True, text=True, check=True)
    assert "usage: automodel-rl COMMAND" in result.stdout
    assert not any(line.endswith((" torch", " numpy", " transformers")) for line in result.stderr.splitlines())


def processor_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_importing_the_library_prints_nothing() -> None:
    script = f"import automodel_rl; [getattr(automodel_rl, name) for name in {automodel_rl.__all__}]"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout + result.stderr == ""
