"""Runs code in its own namespaces, under limits. Run by path, by a bare interpreter: imports only the standard
library.

    python -I -S sandbox_launcher.py apart|here CPU_SECONDS MEMORY_BYTES FILE_BYTES PROCESSES HIDDEN KEPT FILTER < CODE

HIDDEN are folders to hide from the code, KEPT those within them that its interpreter needs, both joined by ":". FILTER
is a system call filter, in hexadecimal digits.

`apart` uses three processes. The outer one enters the namespaces. Its child is the first process of the new process
namespace: it sets up the file system, and all others end with it. The child of that one, which cannot reach it, drops
all rights and becomes the code. When the outer process ends, so does the first one of the namespace, and with it the
code and all that it started, whatever the code does about signals and sessions.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence

NAMESPACES = {
    "mount": 0x00020000,
    "host name": 0x04000000,
    "messages": 0x08000000,
    "users": 0x10000000,
    "processes": 0x20000000,
    "network": 0x40000000,
}
NOBODY = 65534

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP = 1, 4, 8, 22
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_RAISE = 2, 2
CAP_DAC_READ_SEARCH, CAP_VERSION_3 = 2, 0x20080522

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

WRITABLE = (os.path.realpath("/tmp"), "/dev/shm")
"""Folders in which the code may write. They contain only folders that its interpreter needs."""

DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}

COUNTS_PROCESSES_OF_A_NAMESPACE = (5, 14)
"""First Linux whose limit on processes counts those of the user namespace instead of all of the user's."""

libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def main() -> None:
    where, cpu, memory, files, processes, hidden, kept, program = sys.argv[1:]
    limits = {resource.RLIMIT_CPU: int(cpu), resource.RLIMIT_FSIZE: int(files), resource.RLIMIT_NOFILE: 64}
    # One byte instead of 0: with 0, kernels still pass a crashed process to the system's core dump handler.
    limits[resource.RLIMIT_CORE] = 1
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = int(memory)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with contextlib.suppress(OSError):  # out of memory, this is killed before the training
            _write("/proc/self/oom_score_adj", "1000")
    if where == "apart":
        _enter_namespaces()
        _end_with_parent()
        _become_child()
        _make_file_system(*([folder for folder in folders.split(":") if folder] for folders in (hidden, kept)))
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process may inspect this one
        _become_child()
        os.setsid()
        os.chdir(_empty_folder())
        if _linux() >= COUNTS_PROCESSES_OF_A_NAMESPACE:
            limits[resource.RLIMIT_NPROC] = int(processes)
        _give_up_rights()
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (least, least))
    if where == "apart":
        _install_filter(bytes.fromhex(program))
    else:
        _end_with_parent()
    os.execv(sys.executable, [sys.executable, "-I", "-u", "-"])


def _linux() -> tuple[int, ...]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int("".join(c for c in minor if c.isdigit()))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _become_child() -> None:
    """Continues in a child that ends with this process, which waits for it and exits with its code."""
    child = os.fork()
    if not child:
        _end_with_parent()
        return
    while True:
        pid, status = os.wait()  # the first process of a namespace also adopts orphans
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


def _enter_namespaces() -> None:
    """Enters new namespaces, to which children belong. A helper outside of them writes the user mapping."""
    if sys.platform != "linux":
        sys.exit(f"{sys.platform} has no namespaces: use Linux")
    is_ready, ready = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(ready)  # or it would wait for itself
        try:
            if os.read(is_ready, 1):
                _write_users(os.getppid(), os.geteuid(), os.getegid())
            os._exit(0)
        finally:
            os._exit(1)
    flags = 0
    for flag in NAMESPACES.values():
        flags |= flag
    if libc.unshare(flags):
        sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
    os.write(ready, b"1")
    if os.waitpid(helper, 0)[1]:
        sys.exit("this user cannot be mapped into a new namespace: root needs CAP_SETFCAP")


def _write_users(pid: int, user: int, group: int) -> None:
    """Writes the user mapping of a process's new namespace, with this user as nobody. For root, whose processes no
    limit counts, it maps root and nobody if permitted: the code then becomes nobody."""
    folder = f"/proc/{pid}"
    if user == 0 and group == 0:
        with contextlib.suppress(OSError):
            for name in ("gid_map", "uid_map"):
                _write(f"{folder}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return
    with contextlib.suppress(OSError):
        _write(f"{folder}/setgroups", "deny")
    with contextlib.suppress(OSError):  # may be written already
        _write(f"{folder}/gid_map", f"{NOBODY} {group} 1\n")
    _write(f"{folder}/uid_map", f"{NOBODY} {user} 1\n")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _make_file_system(hidden: Sequence[str], kept: Sequence[str]) -> None:
    """Makes all files read-only except in temporary folders, and mounts empty folders over hidden ones."""
    sources = {folder: os.open(folder, os.O_PATH) for folder in kept}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    mount("", "/", "", MS_REC | MS_PRIVATE)
    is_read_only = _set_attributes("/", set_=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    covered = []
    for folder in ("/dev", *hidden):
        if folder not in WRITABLE and os.path.isdir(folder):  # nested ones are already hidden
            mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64k")
            covered.append(folder)
    _make_devices(devices, MOUNT_ATTR_NODEV if is_read_only else 0)
    for folder in WRITABLE:
        os.makedirs(folder, exist_ok=True)
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=4096")
    for folder, source in sources.items():
        os.makedirs(folder, exist_ok=True)
        mount(f"/proc/self/fd/{source}", folder, "", MS_BIND | MS_REC)
    for folder in covered:
        mount("", folder, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    try:
        mount("proc", "/proc", "proc", flags)
    except OSError:  # refused in containers that mask parts of /proc
        mount("tmpfs", "/proc", "tmpfs", flags, "size=4k")


def _empty_folder() -> str:
    """Creates the code's working folder under an unused name: the interpreter's own folder may be beside it."""
    folder = os.path.join(WRITABLE[0], "code")
    while os.path.exists(folder):
        folder += "_"
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    return folder


def _make_devices(devices: Mapping[str, int], forbidden: int) -> None:
    """Bind-mounts devices, given by descriptors, into the new /dev, without the attribute that forbids their use."""
    for name, device in devices.items():
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        mount(f"/proc/self/fd/{device}", f"/dev/{name}", "", MS_BIND)
        _set_attributes(f"/dev/{name}", clear=forbidden)
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() if text else None for text in (source, target, kind)]
    if libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() if options else None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


def _set_attributes(path: str, set_: int = 0, clear: int = 0) -> bool:
    """Calls mount_setattr(2) on all mounts below a path. Returns whether it succeeded."""
    attributes = struct.pack("=4Q", set_, clear, 0, 0)
    arguments = (path.encode(), ctypes.c_uint(AT_RECURSIVE), attributes, ctypes.c_size_t(len(attributes)))
    return libc.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_long(AT_FDCWD), *arguments) == 0


def _give_up_rights() -> None:
    """Becomes nobody, if this process is root. Keeps the right to read files, without which an interpreter in a folder
    of root would not start. Programs that it starts have no other right, whoever owns them."""
    if os.getuid() != 0:
        return
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    right = 1 << CAP_DAC_READ_SEARCH
    if libc.capset(struct.pack("=Ii", CAP_VERSION_3, 0), struct.pack("=6I", right, right, right, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)


def _install_filter(program: bytes) -> None:
    if program:
        instructions = ctypes.create_string_buffer(program, len(program))
        description = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
        pointer = ctypes.create_string_buffer(description, len(description))
        libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(pointer), 0, 0)


if __name__ == "__main__":
    main()
