"""Access to the current microbatch for modules inside a decoder layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch.local_microbatch import LocalMicrobatch


class MicrobatchScope:
    """Holds the microbatch of the layer that is running, None between layers.

    The microbatch is an argument of the layer, so it is correct in every pipeline schedule and in recomputation during
    the backward, where a queue would get out of step. If a layer raises, its microbatch stays until `clear`.

    Args:
        tracks_first: whether to set `is_first`, which the graph of a compiled layer cannot hold.

    Attributes:
        microbatch: this rank's tokens of the microbatch.
        is_first: 1 when a layer computes a microbatch for the first time in a step, 0 when it recomputes it for the
            backward, fp32 []; a tensor, so that compiled layers share one graph.
    """

    def __init__(self, tracks_first: bool = False) -> None:
        self.tracks_first = tracks_first
        self.microbatch: LocalMicrobatch | None = None
        self.is_first = torch.ones(())
        self._computed: set[tuple[int, int]] = set()
        self._flags: dict[bool, Tensor] = {}

    def input(self, name: str) -> Tensor | None:
        """Returns an additional input of the current tokens (batch/tensors.py); None if there is none."""
        return None if self.microbatch is None else self.microbatch.tokens.get(name)

    def start_step(self) -> None:
        self._computed = set()

    def follow(self, layers: dict[int, Any]) -> None:
        """Wraps the forward of layers, given by number, to record the microbatch of every call."""
        for number, layer in layers.items():
            layer.forward = _Followed(self, number, layer.forward)

    def enter(self, number: int, microbatch: LocalMicrobatch) -> None:
        """Records that a layer computes a microbatch."""
        self.microbatch = microbatch
        if not self.tracks_first:  # is_first stays constant, so a graph may capture it
            return
        key = (number, microbatch.index)
        device = microbatch.is_real.device
        if not self._flags or self._flags[True].device != device:
            self._flags = {flag: torch.tensor(float(flag), device=device) for flag in (True, False)}
        self.is_first = self._flags[key not in self._computed]
        self._computed.add(key)

    def clear(self) -> None:
        self.microbatch = None


class _Followed:
    """A forward that records its microbatch. An object rather than a closure, so that a deep copy includes its scope.

    Does nothing while compiling, since the compiler does not trace recomputation that mutates an object; a wrapper
    around the compiled graph records instead.
    """

    def __init__(self, scope: MicrobatchScope, number: int, inner: Callable[..., Any]):
        self.scope, self.number, self.inner = scope, number, inner

    def __call__(self, *args: Any, microbatch: LocalMicrobatch, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, microbatch=microbatch, **kwargs)
        self.scope.enter(self.number, microbatch)
        result = self.inner(*args, microbatch=microbatch, **kwargs)
        self.scope.clear()
        return result
