"""Limits and counters of torch.compile.

Checked with torch 2.11.0 and 2.13.0.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._dynamo.config
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_GRAPHS = 64
"""Most graphs of one function. A function of a layer has some for each kind of layer, and torch's own limit of 8 makes
the rest run uncompiled."""

OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
"""The compiler fuses the two reductions of a norm's backward only from some number of tokens on, and would make a graph
for fewer and one for more. This makes it fuse them always."""


def compile_for_any_size(function: Function) -> Function:
    """Compiles a function at its first call, once for all sizes of its tensors."""
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    return torch.compile(function, dynamic=True, options=OPTIONS)


def compile_for_rows(function: Function) -> Function:
    """Compiles a function at its first call: once for any number of rows, and once for each width of its matrices."""
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        for matrix in args:
            if isinstance(matrix, Tensor) and matrix.ndim == 2:
                torch._dynamo.mark_static(matrix, 1)
        return compiled(*args)

    return cast(Function, call)
