"""`automodel-rl doctor`: installed versions, devices, and what is missing, with the command that installs it."""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from automodel_rl.compat.versions import CHECKED
from automodel_rl.generators.vllm_versions import TESTED, untested

PACKAGE = "automodel-rl"

EXTRAS = {
    "nemo": "model.implementation=nemo_automodel",
    "te": "attention by TransformerEngine on CUDA",
    "fla": "linear attention by kernels on CUDA",
    "fp8": "model.fp8",
    "serve": "automodel-rl serve",
    "ray": "--launcher ray",
    "sign": "weight_sync.signing_key",
    "audio": "audio in data",
    "track": "observe.trackers",
}
"""The extras of this package and what each is for."""

NOT_INSTALLED = "(not installed in this interpreter, only found by its path)"

ASK = "import json, torch, vllm; print(json.dumps([vllm.__version__, torch.__version__, torch.cuda.is_available()]))"

ASK_SECONDS = 120.0


def doctor(vllm_python: str | None = None) -> bool:
    """Prints the state of this installation, and of vLLM in the environment of `vllm_python` if given. Returns
    whether all requirements are met."""
    print(f"{PACKAGE} {_found(PACKAGE) or NOT_INSTALLED}, Python {platform.python_version()}, {platform.platform()}")
    if _found(PACKAGE) is None:
        print("\n".join(_devices()))
        print(f"to install it with its dependencies: pip install {PACKAGE}, or pip install -e . in its folder")
        return False
    needed, missing = _needed()
    for line in (*_devices(), *needed):
        print(line)
    lacking = {extra: lacks for extra in EXTRAS if (lacks := _lacks(extra))}
    for extra, purpose in EXTRAS.items():
        state = f"needs {', '.join(lacking[extra])}" if extra in lacking else "is installed"
        print(f"  {extra:6} {purpose}: {state}")
    print(f"  vLLM   rollout.generator=vllm: {_vllm(vllm_python)}")
    if missing:
        print(f"to repair it: pip install --upgrade {PACKAGE} {' '.join(repr(text) for text in missing)}")
    if lacking:
        print(f"to install all of it: pip install '{PACKAGE}[{','.join(lacking)}]'")
    return not missing


def _devices() -> Iterator[str]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield f"{os.cpu_count()} cores, {memory:.0f} GiB of memory"
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    if not torch.cuda.is_available():
        hint = ", but finds no GPU: check nvidia-smi" if torch.version.cuda else ""
        yield f"no GPU: {built}{hint}"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield f"GPU {number}: {found.name}, {found.total_memory / 2**30:.0f} GiB; {built}"


def _needed() -> tuple[list[str], list[str]]:
    """Returns lines about required and tested packages, and the unmet requirements."""
    lines, missing = [], []
    tested = {name.replace("_", "-"): versions for name, versions in CHECKED.items()}
    for requirement in _requirements(""):
        found = _found(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append(str(requirement).partition(";")[0].strip())
            lines.append(f"  {requirement.name} {found or 'is missing'}: required: {requirement.specifier or 'any'}")
        elif requirement.name in tested:
            lines.append(f"  {requirement.name} {found}; tested with {', '.join(tested[requirement.name])}")
    return lines, missing


def _requirements(extra: str) -> Iterator[Requirement]:
    """Yields the requirements of an extra on this platform, or of the package itself for ""."""
    for text in requires(PACKAGE) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        is_own = marker is None or marker.evaluate({"extra": ""})
        if is_own == (extra == "") and (marker is None or marker.evaluate({"extra": extra})):
            yield requirement


def _lacks(extra: str) -> list[str]:
    lacks = []
    for requirement in _requirements(extra):
        found = _found(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            lacks.append(f"{requirement.name}{requirement.specifier}")
    return lacks


def _found(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _vllm(python: str | None) -> str:
    first, last = (".".join(map(str, tested)) for tested in TESTED)
    if python is None:
        return (
            f"to check it, pass its interpreter: {PACKAGE} doctor --vllm PYTHON; tested with {first} to {last}, in a "
            "separate environment: python -m venv vllm && vllm/bin/pip install vllm"
        )
    done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=ASK_SECONDS)
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"{python} cannot import it ({problem}): {python} -m pip install vllm"
    found, torch_version, has_gpu = json.loads(done.stdout.splitlines()[-1])
    where = "on GPUs" if has_gpu else "on the CPU"
    return untested(found) or f"{found} with torch {torch_version} {where}; tested with {first} to {last}"
