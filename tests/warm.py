"""Python with its libraries imported: `python -m MODULE` as a fork of it, without the seconds that imports cost.

Only libraries of others are imported beforehand, and nothing of them is used; every fork imports this package and the
tests itself. A fork has the environment, the streams, the session and the end of a process of its own, and the local
launcher's ranks are forks in turn. `python -m tests.warm DESCRIPTOR` is the process that is forked.
"""

import atexit
import contextlib
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

from automodel_rl.launch.quiet import quiet_libraries

LIBRARIES = (
    *("numpy.ctypeslib", "PIL.Image", "pydantic.functional_validators", "pydantic.json_schema", "zoneinfo"),
    *("rich.console", "rich.live", "rich.progress_bar", "rich.table", "xxhash"),
    *(
        "yaml",
        "safetensors.torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ),
    *("torch.distributed.pipelining.schedules", "torch.nn.attention.varlen", "torch.utils.checkpoint"),
    *("torchdata.stateful_dataloader", "transformers.integrations.moe", "transformers.models.auto.modeling_auto"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3"),
    "transformers.tokenization_utils_fast",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    *("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni", "transformers.models.auto.video_processing_auto"),
    *("transformers.models.qwen3_vl.video_processing_qwen3_vl", "transformers.models.auto.processing_auto"),
    *("transformers.models.whisper.feature_extraction_whisper", "pydantic.main", "pydantic.types"),
    *("fsspec.core", "pytest"),
)

OURS = ("automodel_rl", "tests")

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}
"""Environment of forks. A launcher that checks chats would have threads of the tokenizer, and ranks fork from it."""

MOST_BYTES = 1 << 18
"""Of a request."""

HIGH = 700
"""The descriptors from here on are free while a fork starts: those that it is to have are below, for ranks are replaced
when they have many files open (`rank_pool.MOST_FILES`)."""

CAN_FORK = not os.path.exists("/dev/nvidiactl")
"""A process that has looked for CUDA devices, as libraries do when they are imported, cannot be forked."""

REQUESTS = "AUTOMODEL_RL_WARM_REQUESTS"
"""Environment variable of a fork with the descriptor by which it asks for others."""


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
            _ask(request, [theirs, *streams, *pass_fds])
        os.close(theirs)
        self.pid = int(os.read(self._answers, 32))

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
            self.returncode = int(os.read(self._answers, 32) or -signal.SIGKILL)
            os.close(self._answers)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRank:
    """A rank of the local launcher as a fork of it; what of `subprocess.Popen` the launcher uses."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[Any] | None,
        stderr: IO[Any] | None,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ):
        assert is_module(command)
        assert start_new_session
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the other threads of its parent"
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _hide_descriptors(
                {0, 1, 2, *pass_fds, _descriptor(stdout, 1), _descriptor(stderr, 2), int(os.environ[REQUESTS])}
            )
            streams = [0, _descriptor(stdout, 1), _descriptor(stderr, 2)]
            _end_with(_Request([*command[2:]], dict(env), os.getcwd(), [*pass_fds]), [*streams, *pass_fds])

    def poll(self) -> int | None:
        return self._take(os.WNOHANG)

    def wait(self) -> int | None:
        return self._take(0)

    def _take(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
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
    """To the process that is forked. Forks share it with the process that has started it."""
    if REQUESTS in os.environ:
        return socket.socket(fileno=int(os.environ[REQUESTS]))
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
        warm = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    atexit.register(_end, warm)
    return requests


def _ask(request: _Request, descriptors: list[int]) -> None:
    """Sends a request with open files: for answers, the streams, and those that the process has besides."""
    socket.send_fds(_requests(), [pickle.dumps(request)], [_requests().fileno(), *descriptors])


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
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, MOST_BYTES, 32)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have watched a process until its end
                pass
        if not message:
            return None
        if os.fork() == 0:
            requests.close()
            ours, answers, *rest = descriptors
            _fork_watched(answers, [ours, *rest])
            os.environ[REQUESTS] = str(fcntl.fcntl(ours, fcntl.F_DUPFD, HIGH))
            os.close(ours)
            return pickle.loads(message), rest
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_watched(answers: int, descriptors: list[int]) -> None:
    """Returns in a fork. This process stays to say its number and its exit code, and ends."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        return
    for descriptor in (0, 1, 2, *descriptors):
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):  # who asked is gone
        os.write(answers, str(pid).encode())
        _, status = os.waitpid(pid, 0)
        os.write(answers, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(request: _Request, descriptors: list[int]) -> None:
    """Becomes the process that was asked for, and runs its module.

    Args:
        request: what to run.
        descriptors: of the streams and of `request.descriptors`, under other numbers.
    """
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
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:  # which is looked at when torch is imported
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed()
    ours = importlib.import_module("tests.warm")
    importlib.import_module("automodel_rl.launch.rank_processes").subprocess = types.SimpleNamespace(
        Popen=ours.ForkedRank
    )
    ours.start_children_warm()
    sys.argv = ["", *request.arguments[1:]]
    runpy.run_module(request.arguments[0], run_name="__main__", alter_sys=True)


def _end_with(request: _Request, descriptors: list[int]) -> NoReturn:
    """Runs a module deep within another program, whose frames must not be left by an exception, and ends."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    _run_and_end(request, descriptors)


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


def _hide_descriptors(kept: set[int]) -> None:
    """Closes what a program that is executed would not have; the numbers stay taken, for objects here own them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept - {nowhere}:
        with contextlib.suppress(OSError):  # that of the listing
            os.fstat(descriptor)
            os.dup2(nowhere, descriptor, inheritable=False)


def main() -> None:
    quiet_libraries()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would look at all that the libraries have made, and copy its pages
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        asked = _serve(requests)
    if asked is not None:
        _run_and_end(*asked)


if __name__ == "__main__":
    main()
