"""Python with its libraries and this package imported: `python -m MODULE` as a fork of it, without the seconds that
imports cost.

Nothing of what is imported is used before the fork. Each fork has its own environment, streams, session and exit. It
also has its own helper process, from which the processes that it starts, such as a launcher's ranks, are forked.
`python -m tests.warm DESCRIPTOR` is the process that is forked.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from automodel_rl.launch.forks import renew_thread_pool
from automodel_rl.launch.quiet import quiet_libraries

IMPORTED = (
    *("cli", "data.chat", "data.checks", "generators.transformers_worker", "rollout.rewards.scorer"),
    *("rollout.rewards.worker", "serve.server", "serve.worker", "trainers.train"),
)
"""Modules of the package, with which the others and most libraries are imported."""

LIBRARIES = (
    *("fsspec.core", "numpy.ctypeslib", "pytest", "rich.console", "rich.live", "rich.progress_bar", "rich.table"),
    *("torch.distributed.fsdp", "torch.nn.attention.varlen", "torchdata.stateful_dataloader", "zoneinfo"),
    *("transformers.models.auto.processing_auto", "transformers.models.auto.video_processing_auto"),
    *("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", "transformers.models.qwen3.modeling_qwen3"),
    *("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", "transformers.tokenization_utils_fast"),
    *("transformers.models.qwen3_vl.video_processing_qwen3_vl", "transformers.integrations.moe"),
    "transformers.models.whisper.feature_extraction_whisper",
)
"""What the package imports when it needs it."""

OF_TESTS = ("bitsandbytes", "hypothesis", "openai", "peft.helpers")
"""What tests import, in each of the processes that run them."""

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}
"""Environment of forks. A launcher that checks chats would have threads of the tokenizer, and ranks fork from it."""

MAX_BYTES = 1 << 18
"""Of a request."""

HIGH = 700
"""The descriptors from here on are free while a fork starts: those that it is to have are below, for ranks are replaced
when they have many files open (`rank_pool.MAX_FILES`)."""

CAN_FORK = not os.path.exists("/dev/nvidiactl")
"""A process that has looked for CUDA devices, as libraries do when they are imported, cannot be forked."""

REQUESTS = "AUTOMODEL_RL_WARM_REQUESTS"
"""Environment variable of a fork with the descriptor by which it asks for others."""

WIDTH = 16
"""Bytes of each of the two numbers that are told of a fork: its id, and its exit code."""

HELPER = b"warm"
"""Name of processes that fork others or watch them; `tests.processes` looks through them."""


def is_module(command: Sequence[str]) -> bool:
    """Whether a command is `python -m MODULE ...`, which can be a fork."""
    return [*command[:2]] == [sys.executable, "-m"]


def cold(command: Sequence[str]) -> list[str]:
    """The same command for a Python of its own, as a user starts it."""
    assert is_module(command)
    return [command[0], "-u", *command[1:]]


class WarmProcess:
    """`python -m MODULE ...` as a fork; what of `subprocess.Popen` the tests use.

    Args:
        command: of which `is_module` is true.
        stdin: what the process reads; None for what this one does.
        stdout: where it writes, in the same way.
        stderr: the same.
        env: its environment, None for this process's.
        pass_fds: descriptors that it has under the same numbers.
        start_new_session: always; a fork has no other way to be alone.

    Attributes:
        pid: of the process.
        returncode: its exit code, negative for a signal; None while it is not known.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdin: IO[Any] | int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
    ):
        assert is_module(command)
        assert start_new_session
        request = _Request([*command[2:]], dict(os.environ if env is None else env), os.getcwd(), [*pass_fds])
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._answers, theirs = os.pipe()
        with open(os.devnull) as nothing:
            given = nothing if stdin == subprocess.DEVNULL else stdin
            streams = [_descriptor(given, 0), _descriptor(stdout, 1), _descriptor(stderr, 2)]
            socket.send_fds(_requests(), [pickle.dumps(request)], [theirs, *streams, *pass_fds])
        os.close(theirs)
        answer = os.read(self._answers, WIDTH)
        if not answer:
            raise RuntimeError("the process to fork from has ended: see what it has written to standard error")
        self.pid = int(answer)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self._lock.acquire(blocking=False):  # else another thread waits, for it has not
            try:
                if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
                    self._take()
            finally:
                self._lock.release()
        return self.returncode

    def wait(self) -> int:
        """The exit code, once it has ended; threads may wait together."""
        with self._lock:
            return self._take()

    def _take(self) -> int:
        if self.returncode is None:
            self.returncode = int(os.read(self._answers, WIDTH) or -signal.SIGKILL)
            os.close(self._answers)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Request:
    """What to run.

    Attributes:
        arguments: the module, and its own.
        environment: of the process.
        folder: it works in.
        descriptors: numbers of those that it has besides the streams.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]


def popen(command: Sequence[str], **options: Any) -> Any:
    """A process as `subprocess.Popen` starts it; `python -m MODULE` is a fork, where there are no CUDA devices."""
    is_warm = CAN_FORK and is_module(command)
    return WarmProcess(command, **options) if is_warm else subprocess.Popen(command, **options)


def start_children_warm() -> None:
    """Lets this process start the processes that generate, and those that reward, as forks, too."""
    importlib.import_module("automodel_rl.generators.child_process").subprocess = types.SimpleNamespace(
        Popen=popen, DEVNULL=subprocess.DEVNULL
    )


@functools.cache
def _requests() -> socket.socket:
    """To the process that is forked: in a fork the one that it has for itself."""
    if REQUESTS in os.environ:
        return socket.socket(fileno=int(os.environ[REQUESTS]))
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
        warm = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    atexit.register(_end, warm)
    return requests


def _end(warm: subprocess.Popen) -> None:
    """The process ends when nobody can ask any more."""
    _requests().close()
    warm.wait()


def _descriptor(stream: IO[Any] | int | None, default: int) -> int:
    if stream is None:
        return default
    return stream if isinstance(stream, int) else stream.fileno()


def _serve(requests: socket.socket) -> tuple[_Request, list[int]] | None:
    """Forks for each request. Returns in a fork what it is to run, and here None once nobody can ask any more."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MAX_BYTES, 32)
        if not message:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            answers, *rest = descriptors
            _fork_watched(answers, rest)
            return pickle.loads(message), rest
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(*_: object) -> None:
    """Takes in processes that have ended, and adds their processor time to this one's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_watched(answers: int, descriptors: list[int]) -> None:
    """Returns in a fork. This process stays to say its number and its exit code, and ends."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        return
    _set_name(HELPER)
    for descriptor in (0, 1, 2, *descriptors):
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        os.write(answers, b"%*d" % (WIDTH, pid))
        _, status = os.waitpid(pid, 0)
        os.write(answers, b"%*d" % (WIDTH, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _set_name(name: bytes) -> None:
    """Names this process in `/proc/PID/comm`, which keeps 15 bytes."""
    _prctl(15, name)  # PR_SET_NAME


def _prctl(option: int, value: bytes | int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _fork_server(descriptors: list[int]) -> None:
    """Starts the process that this one's processes are forked from, while nothing is used yet of what is imported.

    Args:
        descriptors: open files, which the process to fork from must not keep open.
    """
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        os.environ[REQUESTS] = str(fcntl.fcntl(requests, fcntl.F_DUPFD, HIGH))
        requests.close()
        return
    os.setsid()  # what a terminal or a test sends to the other one's group is not for this process
    _set_name(HELPER)
    requests.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for descriptor in {*descriptors, nowhere} - {0, 1, 2}:
        os.close(descriptor)
    asked = _serve(theirs)
    if asked is None:
        os._exit(0)
    _run_and_end(*asked)


def _run(request: _Request, descriptors: list[int]) -> None:
    """Becomes the process that was asked for, and runs its module.

    Args:
        request: what to run.
        descriptors: of the streams and of `request.descriptors`, under other numbers.
    """
    _fork_server(descriptors)
    os.setsid()
    assert max(request.descriptors, default=0) < HIGH
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    for number, descriptor in zip([0, 1, 2, *request.descriptors], moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor in {*descriptors} - {0, 1, 2, *request.descriptors}:
        os.close(descriptor)
    os.chdir(request.folder)
    sys.path.insert(0, request.folder)  # as Python does for -m
    asks = os.environ[REQUESTS]
    os.environ.clear()
    os.environ.update(request.environment, **{REQUESTS: asks}, **ONE_THREAD)
    if "OMP_NUM_THREADS" in os.environ:  # which is looked at when torch is imported
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    else:
        renew_thread_pool()
    random.seed()
    ours = importlib.import_module("tests.warm")
    importlib.import_module("automodel_rl.launch.rank_processes").subprocess = types.SimpleNamespace(Popen=ours.popen)
    ours.start_children_warm()
    _set_name(request.arguments[0].rpartition(".")[2].encode())
    sys.argv = ["", *request.arguments[1:]]
    sys.modules.pop(request.arguments[0], None)  # runpy warns of a module that is there
    runpy.run_module(request.arguments[0], run_name="__main__", alter_sys=True)


def _run_and_end(request: _Request, descriptors: list[int]) -> NoReturn:
    """Runs a module and ends as Python does, but for taking itself apart, which takes a second with these libraries."""
    code: Any = 1
    try:
        _run(request, descriptors)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code or 0)


def main() -> None:
    quiet_libraries()
    for name in (*(f"automodel_rl.{name}" for name in IMPORTED), *LIBRARIES, *OF_TESTS):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the other threads of its parent"
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what outlives who has forked it is a child of this process, which reaps it
    gc.freeze()  # a collection in a fork would look at all that the libraries have made, and copy its pages
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        asked = _serve(requests)
    if asked is not None:
        _run_and_end(*asked)


if __name__ == "__main__":
    main()
