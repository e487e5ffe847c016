"""Which microbatch a decoder layer is computing, for modules inside of it that are not told."""

from collections.abc import Callable
from typing import Any

from automodel_rl.batch import LocalMicrobatch


class MicrobatchScope:
    """The microbatch of the layer that runs now, and None between layers.

    The microbatch is an argument of the layer, so it is the right one in every schedule, also when activations are
    computed again in a backward: a queue of microbatches would come apart there. A failing layer leaves its microbatch
    until `clear`.

    Attributes:
        microbatch: this rank's tokens of it.
    """

    def __init__(self) -> None:
        self.microbatch: LocalMicrobatch | None = None

    def follow(self, layer: Any) -> None:
        """From now on notes what the layer is called with."""
        layer.forward = _Followed(self, layer.forward)

    def clear(self) -> None:
        self.microbatch = None


class _Followed:
    """An object, not a closure, so that a deep copy of the layer has a scope and a forward of its own."""

    def __init__(self, scope: MicrobatchScope, inner: Callable[..., Any]):
        self.scope, self.inner = scope, inner

    def __call__(self, *args: Any, microbatch: LocalMicrobatch, **kwargs: Any) -> Any:
        self.scope.microbatch = microbatch
        result = self.inner(*args, microbatch=microbatch, **kwargs)
        self.scope.microbatch = None
        return result
