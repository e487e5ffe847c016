"""Filter of system calls that a process cannot remove (seccomp(2)).

It refuses what namespaces and limits do not cover:

- unix sockets, which have file names: a read-only file system does not prevent connections to them. Pairs of connected
  sockets are allowed.
- namespaces inside the sandbox: in its own one, a process may mount file systems that fill the memory.
- System V shared memory and messages: no limit counts them.
- io_uring, whose requests no filter sees.
"""

import errno
import platform
import struct
from dataclasses import dataclass

AF_UNIX, SOCK_DGRAM, SOCK_KIND, CLONE_NEWUSER = 1, 2, 0xF, 0x10000000


@dataclass(frozen=True)
class Machine:
    """Constants of an architecture.

    Attributes:
        audit: its number in `struct seccomp_data`.
        calls: its system call numbers.
        foreign: first system call number of another ABI that it also accepts.
    """

    audit: int
    calls: dict[str, int]
    foreign: int = 2**31


@dataclass(frozen=True)
class RefusedCall:
    """A refused system call.

    Attributes:
        error: the errno that it returns.
        argument: index of an argument to test; None refuses every call.
        mask: tested bits of the argument.
        value: the call is refused if these bits equal it.
    """

    call: str
    error: int = errno.EPERM
    argument: int | None = None
    mask: int = 0
    value: int = 0


CALLS = ("socket", "socketpair", "clone", "shmget", "msgget", "unshare", "io_uring_setup", "clone3")

MACHINES = {
    "x86_64": Machine(
        0xC000003E, dict(zip(CALLS, (41, 53, 56, 29, 68, 272, 425, 435), strict=True)), foreign=0x40000000
    ),
    "aarch64": Machine(0xC00000B7, dict(zip(CALLS, (198, 199, 220, 194, 186, 97, 425, 435), strict=True))),
}

RULES = (
    RefusedCall("socket", argument=0, mask=0xFFFFFFFF, value=AF_UNIX),
    RefusedCall("socketpair", argument=1, mask=SOCK_KIND, value=SOCK_DGRAM),  # can send to named sockets
    RefusedCall("unshare"),
    RefusedCall("clone", argument=0, mask=CLONE_NEWUSER, value=CLONE_NEWUSER),
    RefusedCall("clone3", errno.ENOSYS),  # its arguments are in memory; libc falls back to clone
    RefusedCall("shmget"),
    RefusedCall("msgget"),
    RefusedCall("io_uring_setup", errno.ENOSYS),
)

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
REFUSE, ALLOW = 0x00050000, 0x7FFF0000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. Only the low half of an argument is tested: kernels ignore the other one."""


def filter_program(machine: str = "") -> bytes:
    """Returns the filter as an array of `struct sock_filter`; empty on an unknown architecture. `machine` is a name of
    `platform.machine()`; empty for this one."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, known.audit),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, known.foreign),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]
    for rule in RULES:
        refused = (RETURN, 0, 0, REFUSE | rule.error)
        if rule.argument is None:
            program += [(JUMP_EQUAL, 0, 1, known.calls[rule.call]), refused]
            continue
        program += [
            (JUMP_EQUAL, 0, 5, known.calls[rule.call]),
            (LOAD, 0, 0, ARGUMENTS + 8 * rule.argument),
            (AND, 0, 0, rule.mask),
            (JUMP_EQUAL, 0, 1, rule.value),
            refused,
            (LOAD, 0, 0, NUMBER),
        ]
    program.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
