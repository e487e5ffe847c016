"""Starts code in namespaces and limits of its own. Run by path, by a bare interpreter: imports only what that has.

python -I -S sandbox_launcher.py apart|here CPU_SECONDS MEMORY_BYTES FILE_BYTES CODE
"""

import ctypes
import os
import resource
import signal
import sys

CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def main() -> None:
    where, *limits, code = sys.argv[1:]
    cpu, memory, files = map(int, limits)
    _end_with_parent()
    if where == "apart":
        _leave_namespaces()
        child = os.fork()  # the first process of the new process namespace: all others end with it
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) % 256)
        _end_with_parent()
    for name, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    os.execv(sys.executable, [sys.executable, "-I", "-u", "-c", code])


def _end_with_parent() -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _leave_namespaces() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET):
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
