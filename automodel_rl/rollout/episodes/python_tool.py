"""Runs Python code that a model wrote, in a process with namespaces and limits of its own.

The code has no network, sees no other process and ends with all that it started: user, network, process and mount
namespaces (unshare(2)), and limits on memory, processor time, files and output (setrlimit(2)). It can read files that
this user can read. This protects against accidents of a model in training. It is no wall against an attacker: for that,
use a container or a virtual machine of its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from automodel_rl.errors import InputError

MEMORY_BYTES = 2**31
OUTPUT_BYTES = 2**16
START_SECONDS = 30.0

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}


def check_sandbox() -> None:
    """Raises InputError if the system gives the tool no namespaces of its own."""
    found = run_python("print(6 * 7)", START_SECONDS, is_sandboxed=True)
    if found.strip() != "42":
        raise InputError(
            f"rollout.tools=python: the system refuses namespaces for its sandbox ({' '.join(found.split())[:160]}): "
            "allow unprivileged user namespaces, or set rollout.sandbox to none, which lets code of the model use the "
            "network and this user's processes"
        )


def run_python(code: str, seconds: float, is_sandboxed: bool) -> str:
    """What the code prints, and the end of its error if it fails.

    Args:
        code: the code.
        seconds: wall-clock time limit.
        is_sandboxed: whether it must have namespaces of its own. If not, it has only limits.

    Raises:
        TimeoutError: it took too long.
    """
    with tempfile.TemporaryDirectory(prefix="automodel_rl_python_") as folder:
        output = Path(folder) / "output"
        with output.open("wb") as file:
            limits = [str(max(1, round(seconds) + 1)), str(MEMORY_BYTES), str(OUTPUT_BYTES)]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCHER), "apart" if is_sandboxed else "here", *limits, code],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=THREADS,
                start_new_session=True,
            )
            ended = _wait(process, seconds)
        if not ended:
            raise TimeoutError
        text = output.read_bytes()[:OUTPUT_BYTES].decode(errors="replace")
    if process.returncode:
        return f"{text}\n(it ended with code {process.returncode})".strip()
    return text.rstrip("\n") or "(it printed nothing)"


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Waits for a process, and ends it and its session. Returns whether it ended in time."""
    deadline = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return process.poll() is not None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
