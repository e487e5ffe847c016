"""Tells modules inside a decoder layer which microbatch is being computed."""

from collections.abc import Callable
from typing import Any

from automodel_rl.batch import LocalMicrobatch


class MicrobatchScope:
    """Holds the microbatch of the layer that runs now, and None between layers.

    The microbatch is an argument of the layer, so it is right in every schedule, and also when a backward computes
    activations again. A queue of microbatches would get out of step there. If a layer fails, its microbatch stays until
    `clear`.

    Attributes:
        microbatch: this rank's tokens of the microbatch.
    """

    def __init__(self) -> None:
        self.microbatch: LocalMicrobatch | None = None

    def follow(self, layer: Any) -> None:
        """Notes the microbatch of every call of a layer from now on."""
        layer.forward = _Followed(self, layer.forward)

    def clear(self) -> None:
        self.microbatch = None


class _Followed:
    """A forward that notes its microbatch. As an object, no closure, it is copied with its scope in a deep copy."""

    def __init__(self, scope: MicrobatchScope, inner: Callable[..., Any]):
        self.scope, self.inner = scope, inner

    def __call__(self, *args: Any, microbatch: LocalMicrobatch, **kwargs: Any) -> Any:
        self.scope.microbatch = microbatch
        result = self.inner(*args, microbatch=microbatch, **kwargs)
        self.scope.microbatch = None
        return result
