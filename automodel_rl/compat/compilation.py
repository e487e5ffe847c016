"""Compilation by torch.compile for tensors of any size: limits, cache and statistics.

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

MAX_GRAPHS = 64
"""Maximum number of graphs per function. A layer's function has some for each kind of layer; beyond torch's own limit
of 8, the rest would run uncompiled."""

OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "triton.mix_order_reduction_non_strict_mode": True,
    "shape_padding": False,
}
"""Options that prevent separate graphs for few and for many tokens. The compiler fuses the two reductions of a norm's
backward only from some number of tokens on (now always), and pads odd widths, such as a low adapter rank, where that
seems to pay for that many tokens (now never)."""


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Compiled:
    """Compilations of a process. `seconds` includes backward graphs."""

    graphs: int = 0
    seconds: float = 0.0

    def __sub__(self, before: "Compiled") -> "Compiled":
        return Compiled(self.graphs - before.graphs, self.seconds - before.seconds)


class _CompileWatch:
    """Counts this process's compilations from its construction on."""

    def __init__(self) -> None:
        self.graphs, self.seconds, self.started = 0, 0.0, 0.0

    def listen(self) -> "_CompileWatch":
        """Registers the callbacks; again after `torch.compiler.reset`, which drops them."""
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
    """Prepares this process for compilation: no silent fallback, a cache that survives reboots, statistics."""
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    # Otherwise a module's float, such as a norm's epsilon, becomes a CPU tensor, and a CPU kernel in a CUDA graph makes
    # the compiler probe the CPU's instructions, which takes a minute.
    torch._dynamo.config.specialize_float = True
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automodel_rl" / "inductor"
    # torch's default is in the folder for temporary files; importing torch sets the variable.
    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            os.environ[CACHE_VARIABLE] = str(cache)
    return _CompileWatch()


def compiler_cache() -> str:
    """Returns the folder of the compiler's cache, which later runs reuse."""
    _prepare()
    return os.environ.get(CACHE_VARIABLE) or default_cache_dir()


def compiled_so_far() -> Compiled:
    """Returns this process's compilations."""
    watch = _prepare()
    return Compiled(watch.graphs, watch.seconds)


def compile_for_any_size(function: Function) -> Function:
    """Compiles a function on its first call, once for all sizes of its tensors."""
    _prepare()
    return cast(Function, torch.compile(function, dynamic=True, options=OPTIONS))


def outside_of_graphs(function: Function) -> Function:
    """Keeps a function uncompiled within compiled ones, whose graphs break around it."""

    def call(*args: Any, **kwargs: Any) -> Any:  # torch accepts no partial functions
        return function(*args, **kwargs)

    return cast(Function, torch.compiler.disable(call))


def compile_for_rows(function: Function) -> Function:
    """Compiles a function on its first call: once for any number of rows, and once per width of its matrices."""

    @functools.cache
    def compiled() -> Function:  # torch.compile itself imports the compiler, which takes seconds
        return cast(Function, torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        _prepare()
        for matrix in args:
            if isinstance(matrix, Tensor) and matrix.ndim == 2:
                torch._dynamo.mark_static(matrix, 1)
        with torch._dynamo.config.patch(specialize_float=False):  # temperatures vary
            return compiled()(*args)

    return cast(Function, call)
