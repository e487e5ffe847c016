"""Which row a decoder layer is computing, for modules inside of it that are not told."""

from collections.abc import Callable
from typing import Any

from automodel_rl.batch import LocalRow


class RowScope:
    """The row of the layer that runs now, and None between layers.

    The row is an argument of the layer, so it is the right one in every schedule, also when activations are computed
    again in a backward: a queue of rows would come apart there. A failing layer leaves its row until `clear`.

    Attributes:
        row: this rank's tokens of it.
    """

    def __init__(self) -> None:
        self.row: LocalRow | None = None

    def follow(self, layer: Any) -> None:
        """From now on notes what the layer is called with."""
        layer.forward = _Followed(self, layer.forward)

    def clear(self) -> None:
        self.row = None


class _Followed:
    """An object, not a closure, so that a deep copy of the layer has a scope and a forward of its own."""

    def __init__(self, scope: RowScope, inner: Callable[..., Any]):
        self.scope, self.inner = scope, inner

    def __call__(self, *args: Any, row: LocalRow, **kwargs: Any) -> Any:
        self.scope.row = row
        result = self.inner(*args, row=row, **kwargs)
        self.scope.row = None
        return result
