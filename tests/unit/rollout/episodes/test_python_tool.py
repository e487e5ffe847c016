"""The tool `python`: what code prints, and what the sandbox keeps it from."""

import os
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import automodel_rl
from automodel_rl.errors import InputError
from automodel_rl.rollout.episodes import python_tool
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.protocol import Turn
from automodel_rl.rollout.episodes.python_tool import run_python
from automodel_rl.rollout.episodes.system_call_filter import MACHINES, filter_program
from automodel_rl.rollout.episodes.tools import load_tools, schemas_of

LONG = 600.0


def has_namespaces() -> bool:
    try:
        python_tool.check_sandbox("auto")
    except InputError:
        return False
    return True


protected = pytest.mark.skipif(not has_namespaces(), reason="the system gives no namespaces")


def test_python_prints_its_result() -> None:
    (schema,) = schemas_of(load_tools(["python"], False, 5.0))
    assert schema["function"]["name"] == "python"
    assert run_python("print(6 * 7)", LONG, is_sandboxed=False) == "42"
    assert run_python("x = 1", LONG, is_sandboxed=False) == "(it printed nothing)"
    failed = run_python("print('before')\n1 / 0", LONG, is_sandboxed=False)
    assert failed.startswith("before")
    assert failed.endswith("ZeroDivisionError: division by zero\n\n(it ended with code 1)")
    assert "HOME" not in run_python("import os; print(*os.environ)", LONG, is_sandboxed=False)


LONG_CODE = f"text = {'é' * 300_000!r}\nprint(len(text))\nprint(input())"


@pytest.mark.parametrize("is_sandboxed", [False, pytest.param(True, marks=protected)])
def test_code_may_be_longer_than_an_argument_of_a_program(is_sandboxed: bool) -> None:
    printed = run_python(LONG_CODE, LONG, is_sandboxed)
    assert printed.startswith("300000")
    assert "EOFError" in printed
    assert "null byte" in run_python("print(1)\0", LONG, is_sandboxed)


@protected
def test_protected_code_does_what_ordinary_code_does() -> None:
    code = """
import asyncio, concurrent.futures, json, multiprocessing, os, subprocess, sys, tempfile, threading
import numpy
open("note", "w").write("kept")
assert open("note").read() == "kept" and os.listdir() == ["note"]
with tempfile.TemporaryFile() as file:
    file.write(b"x")
assert subprocess.run(["/bin/echo", "hello"], capture_output=True).stdout == b"hello\\n"
assert asyncio.run(asyncio.sleep(0, "slept")) == "slept"
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert len(open("/dev/urandom", "rb").read(4)) == 4
print("to a device", file=open("/dev/null", "w"))
if os.path.exists("/proc/self"):
    open("/dev/stderr", "a").close()
print(json.dumps(numpy.arange(3).tolist()))
sys.exit(3)
"""
    assert run_python(code, LONG, is_sandboxed=True) == "[0, 1, 2]\n\n(it ended with code 3)"
    assert run_python("import os; print(os.listdir())", LONG, is_sandboxed=True) == "[]"  # each call begins anew


@protected
@pytest.mark.parametrize("parent", ["/tmp", "/var/tmp", str(Path.home())])
def test_code_begins_in_an_empty_folder_wherever_the_interpreter_is(parent: str) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = Path(folder).glob("lib/*/site-packages")
        for number, path in enumerate((Path(automodel_rl.__file__).parents[1], *site.getsitepackages())):
            (packages / f"{number}.pth").write_text(f"{path}\n")
        call = "from automodel_rl.rollout.episodes.python_tool import run_python as run; "
        call += 'print(run(\'import os; open("note", "w"); print(os.listdir())\', 60, True))'
        done = subprocess.run([f"{folder}/bin/python", "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout == "['note']\n"


@pytest.mark.parametrize("is_sandboxed", [False, pytest.param(True, marks=protected)])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("bytearray(3 * 2**30)", "MemoryError"),
        ("while True: print('x' * 10000)", "it ended with code"),
        ("open('big', 'wb').write(bytes(5 * 2**20))", "it ended with code"),
        ("import socket\nsockets = [socket.socket() for _ in range(100)]", "Too many open files"),
        ("import os\nos.makedirs('locked/folder')\nos.chmod('locked', 0)\nprint('left')", "left"),
    ],
)
def test_code_has_limits(code: str, expected: str, is_sandboxed: bool) -> None:
    found = run_python(code, LONG, is_sandboxed)
    assert expected in found
    assert len(found) <= python_tool.OUTPUT_BYTES + 100


@dataclass(frozen=True)
class Outside:
    """What code must not reach.

    Attributes:
        names: its names in code: files, sockets and a process.
        file: a file of this user.
        secret: a file in the folder for temporary files.
    """

    names: dict[str, Any]
    file: Path
    secret: Path


@pytest.fixture
def outside() -> Iterator[Outside]:
    """Files and sockets of this user, in a folder that the sandbox does not hide, and in one that it does."""
    with (
        tempfile.TemporaryDirectory(dir=Path(__file__).parent) as seen,
        tempfile.TemporaryDirectory(dir="/tmp") as hidden,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        socket.create_server(("127.0.0.1", 0)) as network,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        file, secret = Path(seen) / "mine", Path(hidden) / "secret"
        for path in (file, secret, Path(shared) / "other"):
            path.write_text("as it was")
            path.chmod(0o666)
        for path in (Path(seen), Path(hidden), Path(shared)):
            path.chmod(0o777)
        names = {
            "FILE": str(file),
            "FOLDER": seen,
            "SECRET": str(secret),
            "SHARED": shared,
            "PID": os.getpid(),
            "PORT": network.getsockname()[1],
            "SOCKET": f"{seen}/socket",
            "ABSTRACT": f"\0automodel_rl_{os.getpid()}",
            "DATAGRAMS": f"{seen}/datagrams",
            "MARK": f"left_behind_{Path(seen).name}",
        }
        by_path.bind(names["SOCKET"])
        abstract.bind(names["ABSTRACT"])
        datagrams.bind(names["DATAGRAMS"])
        for path in (names["SOCKET"], names["DATAGRAMS"]):
            os.chmod(path, 0o777)
        for listener in (by_path, abstract):
            listener.listen()
        yield Outside(names, file, secret)


FORKS = """
started = 0
try:
    while started < 300:
        if not os.fork():
            time.sleep(1000)
        started += 1
except OSError:
    pass
ESCAPED = started >= 100
"""

MANY_FILES = """
written = 0
try:
    for number in range(3000):
        with open(f"WHERE/{number}", "wb") as file:
            written += file.write(bytes(2**16))
except OSError:
    pass
ESCAPED = written > 100 * 2**20
"""

DESCRIPTORS = """
ESCAPED = False
for number in range(3, 64):
    try:
        os.fstat(number)
        ESCAPED = os.readlink(f"/proc/self/fd/{number}") != "/proc"
    except OSError:
        pass
"""

SHARED_MEMORY = """
number = libc.shmget(0, ctypes.c_size_t(2**30), 0o1666)
if number < 0:
    raise OSError
"""

PAIR = """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.sendto(b"x", DATAGRAMS)
"""

ESCAPES = {
    "overwrites a file of the user": "open(FILE, 'w').write('changed')",
    "deletes a file of the user": "os.remove(FILE)",
    "makes a file beside it": "open(FOLDER + '/new', 'w')",
    "renames the folder": "os.rename(FOLDER, FOLDER + '_moved')",
    "changes rights": "os.chmod(FILE, 0)",
    "changes times": "os.utime(FILE, (0, 0))",
    "makes a hard link": "os.link(FILE, FOLDER + '/link')",
    "writes through a symbolic link": "os.symlink(FILE, 'link'); open('link', 'w').write('changed')",
    "writes through its root": "open('/proc/self/root' + FILE, 'w').write('changed')",
    "writes through the root of the first process": "open('/proc/1/root' + FILE, 'w').write('changed')",
    "writes to the system": "open('/etc/automodel_rl_test', 'w')",
    "writes to the home folder": "open(HOME + '/automodel_rl_test', 'w')",
    "reads the home folder": "ESCAPED = HOME != '/' and len(LISTED) > 1 and set(os.listdir(HOME)) == set(LISTED)",
    "reads temporary files": "open(SECRET).read()",
    "reads shared memory": "open(SHARED + '/other').read()",
    "leaves a file in shared memory": "open('/dev/shm/' + MARK, 'w'); ESCAPED = False",
    "leaves a temporary file": "open('/tmp/' + MARK, 'w'); ESCAPED = False",
    "fills the folder for temporary files": MANY_FILES.replace("WHERE", "/tmp"),
    "fills shared memory": MANY_FILES.replace("WHERE", "/dev/shm"),
    "sees other processes": "ESCAPED = sum(name.isdecimal() for name in os.listdir('/proc')) > 2",
    "reads the environment of the first process": "open('/proc/1/environ', 'rb').read()",
    "reads secrets of its environment": "ESCAPED = 'SECRET' in str(os.environ)",
    "sends a signal to another process": "os.kill(PID, 0)",
    "ends the process that watches it": "os.kill(1, signal.SIGKILL); time.sleep(0.05); ESCAPED = os.getppid() != 1",
    "traces the first process": "check(libc.ptrace(16, 1, 0, 0))",
    "looks into the memory of the first process": "open('/proc/1/mem', 'rb')",
    "starts many processes": FORKS,
    "connects to the network": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "connects to a unix socket": "socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "connects to an abstract unix socket": "socket.socket(socket.AF_UNIX).connect(ABSTRACT)",
    "sends to a unix socket": PAIR,
    "takes off a mount": "check(libc.umount2(b'/tmp', 2))",
    "makes files writable again": "check(libc.mount(None, b'/', None, 4096 | 32, None))",
    "mounts": "check(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
    "makes namespaces": "check(libc.unshare(0x10000000 | 0x20000))",
    "makes a namespace for a child": "check(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "becomes root": "os.setuid(0)",
    "makes a device": "os.mknod('disk', 0o60666, os.makedev(254, 0)); open('disk', 'rb').read(1)",
    "opens the memory of the machine": "open('/dev/mem', 'rb')",
    "opens disks": "ESCAPED = any(stat.S_ISBLK(os.stat('/dev/' + name).st_mode) for name in os.listdir('/dev'))",
    "changes settings of the kernel": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "changes its limits": "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "uses descriptors of its parent": DESCRIPTORS,
    "keeps memory that no limit counts": SHARED_MEMORY,
    "keeps messages that no limit counts": "check(libc.msgget(0, 0o1666))",
    "leaves a core dump": "if not os.fork(): os.abort()\nos.wait(); ESCAPED = os.listdir() != []",
}
"""Code that raises OSError where it is stopped. Where that does not show it, the code sets ESCAPED."""

AROUND = """
import ctypes, os, resource, signal, socket, stat, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno())
ESCAPED = True
try:
    exec(CODE)
except (OSError, ValueError) as error:
    ESCAPED = False
print("escaped" if ESCAPED else "stopped")
"""


@protected
@pytest.mark.parametrize("what", ESCAPES)
def test_code_does_not_get_out(what: str, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "told to nobody")
    names = outside.names | {"HOME": str(Path.home()), "CODE": ESCAPES[what], "LISTED": os.listdir(Path.home())}
    constants = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    assert run_python(constants + AROUND, LONG, is_sandboxed=True) == "stopped"
    assert outside.file.read_text() == outside.secret.read_text() == "as it was"
    assert sorted(os.listdir(outside.file.parent)) == ["datagrams", "mine", "socket"]
    for folder in ("/tmp", "/dev/shm"):
        assert not (Path(folder) / outside.names["MARK"]).exists()


BEGIN = "import ctypes, os, signal, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)\n"

STAYS = {
    "computes": "while True: pass",
    "sleeps": "time.sleep(600)",
    "ignores signals": "for one in {*range(1, 32)} - {9, 19}: signal.signal(one, signal.SIG_IGN)\ntime.sleep(600)",
    "leaves its session": "if os.fork(): time.sleep(600)\nos.setsid(); time.sleep(600)",
    "does not end with its parent": "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(600)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)",
    "kills its group": "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(0, signal.SIGTERM); time.sleep(600)",
    "leaves a daemon": "if not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(600)\nos._exit(0)",
}


@protected
@pytest.mark.parametrize("what", STAYS)
def test_code_ends_with_all_that_it_started(what: str) -> None:
    try:
        found = run_python(BEGIN + STAYS[what], LONG if what == "leaves a daemon" else 0.7, is_sandboxed=True)
    except TimeoutError:
        found = "took too long"
    assert found == ("(it printed nothing)" if what == "leaves a daemon" else "took too long")
    while sleepers():
        time.sleep(0.01)


def sleepers() -> set[str]:
    """Processes that run code of the tool."""
    found = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if command.read_bytes().endswith(b"\0-I\0-u\0-\0"):
                found.add(command.parent.name)
        except OSError:
            continue
    return found


@protected
def test_a_pool_warns_of_what_is_missing_and_ends_code_with_its_conversation(tmp_path: Path) -> None:
    for sandbox, message in (("none", "code of the tool python can change this user's files"), ("auto", "")):
        pool = EnvironmentPool(Setup(None, ("python",), LONG, sandbox, str(tmp_path / "log")), ends_on_bad_call=False)
        try:
            assert message in pool.warning
            environment = pool.open({}, 0)
            call = {"name": "python", "arguments": {"code": "print(6 * 7)"}}
            assert environment.step(Turn("", calls=[call])).messages[0]["content"] == "42"
            call["arguments"] = {"code": BEGIN + STAYS["does not end with its parent"]}
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(environment.step, Turn("", calls=[call]))
                while len(sleepers()) < 2:
                    time.sleep(0.01)
                pool.end(environment._number, immediately=True)
                with pytest.raises(RuntimeError, match="its process exited in step"):
                    answer.result()
            while sleepers():
                time.sleep(0.01)
        finally:
            pool.close()


def test_code_without_a_sandbox_reaches_the_network(outside: Outside) -> None:
    code = f"import socket; socket.create_connection(('127.0.0.1', {outside.names['PORT']}), 2); print('connected')"
    assert run_python(code, LONG, is_sandboxed=False) == "connected"


@pytest.mark.parametrize(
    ("sandbox", "found", "message"),
    [
        ("auto", "unshare: Operation not permitted", "allow unprivileged user namespaces, or set rollout.sandbox"),
        ("strict", '["a limit on processes"]', "does not provide a limit on processes for the tool python: use Linux"),
        ("auto", '["a wall", "a limit"]', "warning: the system does not provide a wall and a limit for the tool"),
        ("strict", "[]", ""),
        ("none", "", "warning: rollout.sandbox=none: code of the tool python can change this user's files"),
    ],
)
def test_missing_protection_is_said_or_refused(
    sandbox: str, found: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_tool, "run_python", lambda *_, **__: found)
    try:
        said = python_tool.check_sandbox(sandbox)
    except InputError as error:
        said = str(error)
    assert message in said
    assert bool(message) == bool(said)


def test_filters_are_made_for_known_machines_alone() -> None:
    lengths = [len(filter_program(machine)) for machine in MACHINES]
    assert len(set(lengths)) == 1
    assert lengths[0] % 8 == 0
    assert filter_program("a machine of tomorrow") == b""
