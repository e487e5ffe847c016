"""Runs the corners of the supported versions, each in an environment of its own, and writes the page about them.

python -m tests.versions [NAME...]

An environment is made in .versions/NAME, or used again. Real vLLM runs in .venv-vllm, vLLM's sources are read from its
published wheels.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.versions.vllm_contract import WHEELS, Sources, problems_of
from tests.vllm_environment import ROOT

FOLDER, RECORD = ROOT / ".versions", Path(__file__).with_name("tested.json")
PAGE = ROOT / "automodel_rl" / "compat" / "README.md"

TESTS = ["tests/unit", "tests/distributed/parallel/test_parity.py"]
REAL_VLLM = "tests/distributed/trainers/test_real_vllm.py"

FREE = ("torch", "transformers", "triton", "nvidia-", "cuda-", "numpy", "tokenizers", "huggingface")
"""Beginnings of packages whose versions follow from a corner's own, and not from constraints.txt."""


@dataclass(frozen=True)
class Corner:
    """Versions that are tested together.

    Attributes:
        python: the interpreter's version.
        pins: what is pinned.
        extras: extras of this package that are installed.
        runs_vllm: whether vLLM is run.
    """

    python: str
    pins: tuple[str, ...]
    extras: str
    runs_vllm: bool = False


CORNERS = {
    "oldest": Corner("3.11", ("torch==2.11.0", "transformers==5.18.0"), "dev,nemo"),
    "middle": Corner("3.11", ("torch==2.13.0", "transformers==5.20.2"), "dev", runs_vllm=True),
    "newest": Corner("3.13", ("torch==2.15.0", "transformers==5.24.0"), "dev"),
}


def make_environment(name: str, corner: Corner) -> Path:
    """The interpreter of a corner's environment, which is made if it is not there."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if (folder / "installed").is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    base = shutil.which(f"python{corner.python}")
    if base is None:
        sys.exit(f"error: no python{corner.python} found: install it, or name the corners to run: {', '.join(CORNERS)}")
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not line.lower().startswith(FREE)) + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*install, *corner.pins, "--editable", f".[{corner.extras}]"], check=True, cwd=ROOT)
    (folder / "installed").touch()
    return python


def run_tests(python: Path, corner: Corner) -> dict[str, int]:
    """Numbers of tests by their outcome."""
    command = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        [*command, *([REAL_VLLM] if corner.runs_vllm else [])],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    *_, last = [line for line in done.stdout.splitlines() if re.search(r"\d+ (passed|failed|error)", line)] or [""]
    counts = {
        kind.rstrip("s"): int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    if done.returncode:
        print(
            "\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))) or done.stderr
        )
    return counts


def run_corner(name: str, corner: Corner) -> dict[str, object]:
    print(f"{name}: Python {corner.python}, {', '.join(corner.pins)}", flush=True)
    python = make_environment(name, corner)
    counts = run_tests(python, corner)
    print(f"{name}: {counts}", flush=True)
    nemo = "nemo-automodel 0.7.0" if "nemo" in corner.extras else ""
    vllm = "0.32 (a build for CPUs), run" if corner.runs_vllm else ""
    packages = [pin.replace("==", " ") for pin in corner.pins]
    return {"with": [f"Python {corner.python}", *packages, *filter(None, [nemo])], "vllm": vllm, "tests": counts}


def check_vllm() -> dict[str, list[str]]:
    found = {version: list(problems_of(Sources.of_version(version))) for version in WHEELS}
    for version, problems in found.items():
        print(f"vLLM {version}, sources: {'; '.join(problems) or 'as this package uses it'}", flush=True)
    return found


def write_page(record: dict[str, dict]) -> None:
    rows = [
        f"| {', '.join(corner['with'])} | {corner['vllm'] or '–'} | {corner['tests'].get('passed', 0):,} passed, "
        f"{corner['tests'].get('failed', 0) + corner['tests'].get('error', 0)} failed, "
        f"{corner['tests'].get('skipped', 0)} skipped |"
        for corner in record["corners"].values()
    ]
    fit = [version for version, problems in record["vllm"].items() if not problems]
    PAGE.write_text(
        "# compat: private names of libraries, and versions\n\n"
        "This folder is the only one that uses private names of torch, transformers and nemo_automodel. Its files "
        "list the\nversions that they were checked with, and a test fails with other versions "
        "(compat/versions.py: CHECKED).\n\n"
        "## Tested version combinations\n\n"
        f"`make versions`, {record['date']}, CPU and gloo: unit tests, and layouts against one process.\n\n"
        "| versions | vLLM | tests |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "Everything that this package uses of vLLM (classes, methods, arguments, fields, routes) exists in the "
        f"expected form in\nthe sources of {', '.join(fit)}. vLLM 0.23 and 0.33 were run on GPUs,\n0.32 on a CPU.\n"
    )


def main() -> None:
    names = sys.argv[1:] or [*CORNERS]
    unknown = [name for name in names if name not in CORNERS]
    if unknown:
        sys.exit(f"error: {unknown[0]} is none of the corners {', '.join(CORNERS)}")
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {"corners": {}}
    record |= {"date": str(datetime.date.today()), "vllm": check_vllm()}
    for name in names:
        record["corners"][name] = run_corner(name, CORNERS[name])
    record["corners"] = {name: record["corners"][name] for name in CORNERS if name in record["corners"]}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record)
    is_sound = all(c["tests"].get("failed", 0) + c["tests"].get("error", 0) == 0 for c in record["corners"].values())
    sys.exit(not is_sound or any(record["vllm"].values()))


if __name__ == "__main__":
    main()
