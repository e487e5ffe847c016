"""Tells modules inside a decoder layer which microbatch is being computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch.local_microbatch import LocalMicrobatch


class MicrobatchScope:
    """Holds the microbatch of the layer that runs now, and None between layers.

    The microbatch is an argument of the layer, so it is right in every schedule, and also when a backward computes
    activations again. A queue of microbatches would get out of step there. If a layer fails, its microbatch stays until
    `clear`.

    Args:
        tells_first: whether `is_first` is told, which the graph of a compiled layer cannot hold.

    Attributes:
        microbatch: this rank's tokens of the microbatch.
        is_first: 1 where a layer computes a microbatch for the first time in a step, 0 where it computes it again for
            the backward, fp32 []. It is a tensor, so that compiled layers need no graph for each.
    """

    def __init__(self, tells_first: bool = False) -> None:
        self.tells_first = tells_first
        self.microbatch: LocalMicrobatch | None = None
        self.is_first = torch.ones(())
        self._computed: set[tuple[int, int]] = set()
        self._flags: dict[bool, Tensor] = {}

    def input(self, name: str) -> Tensor | None:
        """An input of the tokens of the layer that runs now (batch/tensors.py); None if there is none."""
        return None if self.microbatch is None else self.microbatch.tokens.get(name)

    def start_step(self) -> None:
        self._computed = set()

    def follow(self, layers: dict[int, Any]) -> None:
        """Notes the microbatch of every call of these layers from now on.

        Args:
            layers: layers by number.
        """
        for number, layer in layers.items():
            layer.forward = _Followed(self, number, layer.forward)

    def enter(self, number: int, microbatch: LocalMicrobatch) -> None:
        """Notes that a layer computes a microbatch."""
        self.microbatch = microbatch
        if not self.tells_first:  # and a graph may hold it
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
    """A forward that notes its microbatch. As an object, no closure, it is copied with its scope in a deep copy.

    In a graph it notes nothing, for a compiler does not trace recomputation that changes an object: one around the
    graph does.
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
