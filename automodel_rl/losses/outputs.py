"""What a loss gets and what it gives: sums, never means. `PPLossAdapter` divides them once, by global counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from automodel_rl.batch import Microbatch

Denominator = Literal["tokens", "sequences", "pairs", "positions"]
"""What a sum is divided by: targets with `loss_mask` set, real sequences, half their number, or all their tokens, of
the global batch."""


@dataclass(frozen=True)
class Readout:
    """What is read from the model's final logits for every token.

    Attributes:
        temperature: the logits are divided by it before the softmax.
        entropy: whether the softmax's entropy is wanted, too.

    Raises:
        ValueError: the temperature is not above 0.

    Example:
        >>> Readout(temperature=0.7, entropy=True)
        Readout(temperature=0.7, entropy=True)
    """

    temperature: float = 1.0
    entropy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: logits are divided by it, so it must be above 0; for the likeliest "
                "token use Engine.next_tokens"
            )


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of one microbatch.

    Attributes:
        logprobs: log-probability of every target under the model, [T], fp32 or float64; 0 where there is no target.
        entropy: of the model's distribution over the target, in nats, [T], 0 where there is no target; None if it was
            not asked for.

    Example:
        >>> import torch
        >>> TokenOutputs(logprobs=torch.tensor([-0.5, -1.5, 0.0])).entropy is None
        True
    """

    logprobs: Tensor
    entropy: Tensor | None = None

    @classmethod
    def from_columns(cls, columns: Tensor) -> "TokenOutputs":
        """Of what a `Readout` gives.

        Args:
            columns: [T, 1], or [T, 2] with entropies.
        """
        return cls(*columns.unbind(1))


@dataclass(frozen=True)
class LossOutput:
    """Sums over one microbatch.

    Attributes:
        sums: scalar tensors that carry gradients, by what divides them: "tokens", targets with `loss_mask` set;
            "sequences"; "pairs", half their number; "positions", all their tokens; of the global batch. The loss is the
            total of all.
        metrics: name -> (sum, denominator), scalar tensors without gradient; reported as total / total.

    Example:
        >>> import torch
        >>> def length_loss(outputs, microbatch):  # a loss of one's own: the mean length of sequences, and no gradient
        ...     total = 0 * outputs.logprobs.sum() + microbatch.num_tokens
        ...     return LossOutput(sums={"sequences": total}, metrics={"microbatches": (torch.ones(()), torch.ones(()))})
    """

    sums: dict[Denominator, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


LossFn = Callable[[TokenOutputs, Microbatch], LossOutput]


def count(microbatches: Sequence[Microbatch]) -> dict[Denominator, int]:
    """Denominators of one data rank's microbatches, known before any forward. Masks that depend on results never
    enter."""
    return {
        "tokens": sum(int(microbatch.loss_mask.sum()) for microbatch in microbatches),
        "sequences": sum(microbatch.num_sequences for microbatch in microbatches),
        "pairs": sum(microbatch.num_sequences for microbatch in microbatches) // 2,
        "positions": sum(microbatch.num_tokens for microbatch in microbatches if not microbatch.is_empty),
    }
