"""Adapters of several trainings in one pass.

Each training has some of the rows of every `lora_A` and the same columns of every `lora_B`, and no two have one in
common. The gate of a token has a factor for each of them: the scale of its own training, and 0 for those of the others.
So a token gets the output of its own training's adapters, and gives gradients to these alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from automodel_rl.batch import LocalMicrobatch


class AdapterGate:
    """Holds the gate of the microbatch that a layer computes now.

    The microbatch is an argument of the layer, so it is right in every schedule, and also when a backward computes
    activations again.

    Attributes:
        factors: [t, rank]; None if all adapters belong to one training.
    """

    def __init__(self) -> None:
        self.factors: Tensor | None = None

    def follow(self, layers: Iterable[Any]) -> None:
        """Takes the gate of every call of these layers from their microbatch from now on."""
        for layer in layers:
            layer.forward = _Gated(self, layer.forward)


class _Gated:
    """A forward that shows the gate of its microbatch. As an object, it is copied with the gate in a deep copy."""

    def __init__(self, gate: AdapterGate, inner: Callable[..., Any]):
        self.gate, self.inner = gate, inner

    def __call__(self, *args: Any, microbatch: LocalMicrobatch, **kwargs: Any) -> Any:
        self.gate.factors = microbatch.adapter_gate
        result = self.inner(*args, microbatch=microbatch, **kwargs)
        self.gate.factors = None
        return result
