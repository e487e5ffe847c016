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


def test_help_needs_no_torch_and_under_a_second_of_the_processor() -> None:
    arguments = ["-m", "automodel_rl", "--help"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1.0
    assert "usage: automodel-rl COMMAND" in result.stdout
    traced = [sys.executable, "-X", "importtime", *arguments]
    imports = subprocess.run(traced, capture_output=True, text=True, check=True).stderr
    assert not any(line.endswith((" torch", " numpy", " transformers")) for line in imports.splitlines())


def test_importing_the_library_prints_nothing() -> None:
    script = f"import automodel_rl; [getattr(automodel_rl, name) for name in {automodel_rl.__all__}]"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout + result.stderr == ""
