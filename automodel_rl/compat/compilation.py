"""Compilation by torch.compile for tensors of any size: its limits, its cache, and how much was compiled.

Checked with torch 2.11.0 and 2.13.0.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch._dynamo.config
from torch import Tensor
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_GRAPHS = 64
"""Most graphs of one function. A function of a layer has some for each kind of layer, and torch's own limit of 8 makes
the rest run uncompiled."""

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.mix_order_reduction_non_strict_mode": True,
    "shape_padding": False,
}
"""Options without which the compiler would make one graph for few tokens and another for more. It fuses the two
reductions of a norm's backward only from some number of tokens on: now always. And it pads odd widths, such as a low
rank of adapters, where that seems to pay for so many tokens: now never."""


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Compiled:
    """What a process has compiled.

    Attributes:
        graphs: number of graphs.
        seconds: time that it took, backward graphs included.
    """

    graphs: int = 0
    seconds: float = 0.0

    def __sub__(self, before: "Compiled") -> "Compiled":
        return Compiled(self.graphs - before.graphs, self.seconds - before.seconds)


class _CompileWatch:
    """Counts compilations of this process from its making on."""

    def __init__(self) -> None:
        self.graphs, self.seconds, self.started = 0, 0.0, 0.0

    def listen(self) -> "_CompileWatch":
        """Is told of compilations from here on; again after `torch.compiler.reset`, which forgets who is told."""
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)
        return self

    def _start(self, event: CallbackArgs) -> None:
        self.started = time.perf_counter()

    def _end(self, event: CallbackArgs) -> None:
        self.seconds += time.perf_counter() - self.started
        self.graphs += event.callback_trigger is CallbackTrigger.DYNAMO


def _prepare() -> _CompileWatch:
    return _prepare_once().listen()


@functools.cache
def _prepare_once() -> _CompileWatch:
    """Prepares this process for compilation: no silent fallback, a cache that outlives the machine's start, a watch."""
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # Else a number of a module, such as a norm's epsilon, is a tensor on the CPU, and a kernel for the CPU in a graph
    # for CUDA makes the compiler try out what instructions the CPU has, which takes a minute.
    torch._dynamo.config.specialize_float = True
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automodel_rl" / "inductor"
    # torch's own place is in the folder for temporary files. It sets the variable when it is imported.
    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            os.environ[CACHE_VARIABLE] = str(cache)
    return _CompileWatch()


def compiler_cache() -> str:
    """The folder of the compiler's cache, in which the next run finds what this one compiles."""
    _prepare()
    return os.environ.get(CACHE_VARIABLE) or default_cache_dir()


def compiled_so_far() -> Compiled:
    """What this process has compiled."""
    watch = _prepare()
    return Compiled(watch.graphs, watch.seconds)


def compile_for_any_size(function: Function) -> Function:
    """Compiles a function at its first call, once for all sizes of its tensors."""
    _prepare()
    return cast(Function, torch.compile(function, dynamic=True, options=OPTIONS))


def outside_of_graphs(function: Function) -> Function:
    """The function as it is written, also within compiled ones, whose graphs end before it and begin again after it."""

    def call(*args: Any, **kwargs: Any) -> Any:  # torch takes no partial functions
        return function(*args, **kwargs)

    return cast(Function, torch.compiler.disable(call))


def compile_for_rows(function: Function) -> Function:
    """Compiles a function at its first call: once for any number of rows, and once for each width of its matrices."""

    @functools.cache
    def compiled() -> Function:  # torch.compile itself imports the compiler, which takes seconds
        return cast(Function, torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        _prepare()
        for matrix in args:
            if isinstance(matrix, Tensor) and matrix.ndim == 2:
                torch._dynamo.mark_static(matrix, 1)
        with torch._dynamo.config.patch(specialize_float=False):  # temperatures are many
            return compiled()(*args)

    return cast(Function, call)
