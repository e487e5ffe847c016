"""The Dockerfile: hadolint has nothing to say about it, and what it copies and installs is there."""

import re
import subprocess
import sys
from pathlib import Path

from automodel_rl.generators.vllm_versions import untested
from automodel_rl.tools.doctor import EXTRAS
from tests.pages import ROOT


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_hadolint_finds_nothing() -> None:
    """But that versions of Debian's packages are not pinned: their archive keeps none but the newest."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--ignore", "DL3008", "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_and_installed_is_there() -> None:
    copied = [part for word, rest in instructions() if word == "COPY" for part in rest.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (extras,) = re.findall(r"'\.\[(.+?)\]'", (ROOT / "Dockerfile").read_text())
    assert {*extras.split(",")} <= EXTRAS.keys()


def test_vllm_is_of_a_tested_version() -> None:
    (version,) = (rest.partition("=")[2] for word, rest in instructions() if word == "ARG" and "VLLM" in rest)
    assert untested(version) == ""
