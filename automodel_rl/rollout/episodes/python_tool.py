"""Runs Python code that a model wrote, in a process with its own namespaces and limits.

The code has no network. It sees no other process, no device, and no file of this user's home or of shared temporary
folders. It can write only to an empty temporary folder that is removed afterwards. All that it starts ends with it.
This uses user, network, process, mount, message and host name namespaces (unshare(2)), a read-only file system
(mount_setattr(2)), a filter of system calls (seccomp(2)), and limits on memory, processor time, processes, files and
output (setrlimit(2)). The code can read other files that this user can read. This protects against accidents of a
model in training, not against an attacker: for that, use a container or a virtual machine.
"""

import contextlib
import functools
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from automodel_rl.errors import InputError
from automodel_rl.files import TemporaryFolder
from automodel_rl.rollout.episodes.system_call_filter import filter_program

MEMORY_BYTES = 2**31
OUTPUT_BYTES = 2**16
MAX_PROCESSES = 64
START_SECONDS = 30.0

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}

TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")
"""Folders of shared temporary files and sockets, whose content is hidden from the code."""

OLDEST_LINUX = "5.14"
"""First Linux with all that the sandbox uses."""

PROBE = f"""
import json, os, signal, socket
missing = []
def is_writable(path):
    return not os.statvfs(path).f_flag & os.ST_RDONLY and os.stat(path).st_dev != os.stat(".").st_dev
if any(is_writable("/" + name) for name in ("", *os.listdir("/")) if os.path.isdir("/" + name)):
    missing.append("a read-only file system")
try:
    socket.socket(socket.AF_UNIX).close()
    missing.append("a wall before unix sockets")
except OSError:
    pass
try:
    for _ in range({MAX_PROCESSES}):
        if not os.fork():
            signal.pause()
    missing.append("a limit on processes")
except OSError:
    pass
print(json.dumps(missing))
"""
"""Prints what a sandbox lacks. The processes that it starts end with it."""

FOLDERS = """
import os, sys
maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
libraries = {line[line.index("/"):] for line in maps.splitlines() if "/" in line}
print(*sys.path, *map(os.path.dirname, libraries), sep="\\n")
"""
"""Prints an interpreter's import folders, and those of its shared libraries."""


def check_sandbox(sandbox: str) -> str:
    """Returns one line of warning on protection that the system does not allow; empty if nothing is missing.

    Args:
        sandbox: rollout.sandbox: none requires no protection, strict all of it, auto at least namespaces.

    Raises:
        InputError: the system allows less than required.
    """
    if sandbox == "none":
        return (
            "warning: rollout.sandbox=none: code of the tool python can change this user's files and use its processes "
            "and the network"
        )
    found = run_python(PROBE, START_SECONDS, is_sandboxed=True)
    try:
        missing = " and ".join(json.loads(found))
    except ValueError:
        raise InputError(
            f"rollout.tools=python: the system refuses namespaces for its sandbox ({' '.join(found.split())[-160:]}): "
            "allow unprivileged user namespaces, or set rollout.sandbox to none, which lets the model's code use the "
            "network and this user's files and processes"
        ) from None
    if missing and sandbox == "strict":
        raise InputError(
            f"rollout.sandbox=strict: the system does not provide {missing} for the tool python: use Linux "
            f"{OLDEST_LINUX} or newer, not as root without the right to change users, or set rollout.sandbox to "
            "auto, which only warns"
        )
    return (
        f"warning: the system does not provide {missing} for the tool python (rollout.sandbox=auto)" if missing else ""
    )


def run_python(code: str, seconds: float, is_sandboxed: bool) -> str:
    """Runs code, and returns its output, with the end of its error if it fails.

    Args:
        seconds: wall-clock time limit.
        is_sandboxed: use namespaces. Otherwise only limits apply.

    Raises:
        TimeoutError: it took too long.
    """
    hidden, kept = _hidden_folders() if is_sandboxed else ((), ())
    limits = [max(1, round(seconds) + 1), MEMORY_BYTES, OUTPUT_BYTES, MAX_PROCESSES]
    arguments = [*map(str, limits), ":".join(hidden), ":".join(kept), filter_program().hex()]
    # Files without a name, so that the code cannot replace them.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, _working_folder(is_sandboxed) as folder:
        given.write(code.encode(errors="replace"))
        given.seek(0)
        os.fchmod(output.fileno(), 0o666)  # for code that runs as nobody and opens /dev/stdout
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), "apart" if is_sandboxed else "here", *arguments],
            stdin=given,  # a program's argument has at most 128 KiB
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=THREADS,
            start_new_session=True,
        )
        if not _wait(process, seconds):
            raise TimeoutError
        output.seek(0)
        text = output.read(OUTPUT_BYTES).decode(errors="replace")
    if process.returncode:
        return f"{text}\n(it ended with code {process.returncode})".strip()
    return text.rstrip("\n") or "(it printed nothing)"


def _working_folder(is_sandboxed: bool) -> contextlib.AbstractContextManager[str]:
    if is_sandboxed:
        return contextlib.nullcontext("/")
    return TemporaryFolder()


@functools.cache
def _hidden_folders() -> tuple[list[str], list[str]]:
    """Returns the folders to hide from the code, and those within them that its interpreter needs."""
    hidden = _outermost(_with_targets([*TEMPORARY, *_homes()]))
    command = [sys.executable, "-I", "-c", FOLDERS]
    used = subprocess.run(command, env=THREADS, capture_output=True, text=True, check=True).stdout.splitlines()
    needed = _with_targets([sys.prefix, sys.base_prefix, *used, *_folders_of(sys.executable)])
    return hidden, _outermost(folder for folder in needed if os.path.isdir(folder) and _is_within(folder, hidden))


def _homes() -> list[str]:
    found = [str(Path.home())]
    with contextlib.suppress(KeyError):  # a container may run as a user without a name
        found.append(pwd.getpwuid(os.getuid()).pw_dir)
    return found


def _with_targets(folders: Sequence[str]) -> list[str]:
    return [*folders, *map(os.path.realpath, folders)]


def _folders_of(program: str) -> list[str]:
    """Returns the folder of a program, and those of all its link targets."""
    folders = [os.path.dirname(program)]
    while os.path.islink(program):
        program = os.path.join(os.path.dirname(program), os.readlink(program))
        folders.append(os.path.dirname(program))
    return folders


def _outermost(folders: Iterable[str]) -> list[str]:
    found: list[str] = []
    for folder in sorted({os.path.normpath(folder) for folder in folders} - {"/"}):
        if not _is_within(folder, found):
            found.append(folder)
    return found


def _is_within(folder: str, others: Iterable[str]) -> bool:
    return any(Path(folder).is_relative_to(other) for other in others)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Waits for a process, then kills it and its session. Returns whether it ended in time."""
    deadline = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return process.poll() is not None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
