"""The inputs and the output of a loss. It gives sums, never means; `PPLossAdapter` divides them by global counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch

Denominator = Literal["tokens", "sequences", "pairs", "positions", "chosen_tokens"]
"""What a sum is divided by, counted over the global batch. "tokens": targets with `loss_mask` set; "sequences": real
sequences; "pairs": half their number; "positions": all their tokens; "chosen_tokens": targets with `loss_mask` set of
the first sequence of each pair."""

UNDIVIDED: dict[Denominator, int] = dict.fromkeys(get_args(Denominator), 1)
"""Counts that leave sums as they are."""


@dataclass(frozen=True)
class Readout:
    """What is read from the model's final logits for every token.

    Attributes:
        temperature: the logits are divided by it before the softmax.
        entropy: whether to read the softmax's entropy, too.
        ids: the name of the values [T, K] that have token ids, int64, to read the log-probabilities of, besides the
            target's; -1 for none. None reads the target's alone.
        scores: whether to read the outputs of a linear head, which the model then has in place of the vocabulary's.
        mtp: whether to read the log-probability of the token after the next, by the model's MTP layer.

    Raises:
        ValueError: the temperature is not above 0.

    Example:
        >>> Readout(temperature=0.7, entropy=True)
        Readout(temperature=0.7, entropy=True, ids=None, scores=False, mtp=False)
    """

    temperature: float = 1.0
    entropy: bool = False
    ids: str | None = None
    scores: bool = False
    mtp: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: logits are divided by it, so it must be above 0; for the likeliest "
                "token use Engine.next_tokens"
            )


@dataclass(frozen=True)
class TokenOutputs:
    """What a loss gets to know of the model for one microbatch.

    Attributes:
        logprobs: log-probability of every target under the model, [T], fp32 or float64; 0 where there is no target. [0]
            if scores were read in its place.
        entropy: entropy of the model's distribution over the target, in nats, [T]; 0 where there is no target; None if
            it was not asked for.
        at: log-probabilities of the tokens of `Readout.ids` under the model, [T, K]; 0 where there is no such token or
            no target; None if they were not asked for.
        scores: outputs of a linear head, read at every token and not at its predictor, [T, L]; None if they were not
            asked for.
        mtp: log-probability of the token after the next under the model's MTP layer, [T]; 0 where there is none; None
            if it was not asked for.

    Example:
        >>> import torch
        >>> TokenOutputs(logprobs=torch.tensor([-0.5, -1.5, 0.0])).entropy is None
        True
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    at: Tensor | None = None
    scores: Tensor | None = None
    mtp: Tensor | None = None

    @classmethod
    def from_columns(cls, columns: Tensor, readout: Readout) -> "TokenOutputs":
        """The outputs in the columns that a readout gives.

        Args:
            columns: [T, 1], then K columns if ids are read, one of entropies if these are, and one of the tokens after
                the next if these are; or [T, L] scores.
            readout: what was read.
        """
        if readout.scores:
            return cls(columns.new_zeros(0), scores=columns)
        end = columns.shape[1] - readout.entropy - readout.mtp
        entropy = columns[:, end] if readout.entropy else None
        at = None if readout.ids is None else columns[:, 1:end]
        return cls(columns[:, 0], entropy, at, mtp=columns[:, -1] if readout.mtp else None)


@dataclass(frozen=True)
class LossOutput:
    """Sums over one microbatch.

    Attributes:
        sums: scalar tensors that carry gradients, by what divides them: "tokens" (targets with `loss_mask` set),
            "sequences", "pairs" (half the sequences), "positions" (all tokens of the sequences) or "chosen_tokens"
            ("tokens" of the first of each pair), counted over the global batch. The loss is the total of the quotients.
        metrics: name -> (sum, denominator), scalar tensors without gradient. Both are added up over microbatches and
            ranks before they are divided.
        largest, smallest: name -> scalar tensor without gradient, a metric that is the largest, or the smallest, over
            microbatches and ranks.
        beside: like `sums`, of what is trained beside the loss and does not count in it.

    Example:
        >>> import torch
        >>> def length_loss(outputs, microbatch):  # a loss of one's own: the mean length of sequences, and no gradient
        ...     total = 0 * outputs.logprobs.sum() + microbatch.num_tokens
        ...     return LossOutput(sums={"sequences": total}, metrics={"microbatches": (torch.ones(()), torch.ones(()))})
    """

    sums: dict[Denominator, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    smallest: dict[str, Tensor] = field(default_factory=dict)
    beside: dict[Denominator, Tensor] = field(default_factory=dict)


LossFn = Callable[[TokenOutputs, Microbatch], LossOutput]


@dataclass(frozen=True)
class LinearLoss:
    """A loss that is a weighted sum of log-probabilities, with weights that do not depend on the model.

    Its gradient is known before the forward. So the head makes gradients while it has the logits, and need not make
    the logits again. As every loss it is called with `outputs` and a `microbatch`.

    Attributes:
        weights: gives the weight of the log-probability of every target of a microbatch, [T], or of every token of
            `Readout.ids`, [T, K].
        denominator: what the sum is divided by.

    Example:
        >>> import torch
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> likelihood = LinearLoss(lambda microbatch: microbatch.loss_mask.float(), "sequences")
        >>> likelihood(TokenOutputs(torch.tensor([-0.5, -1.5, 0.0])), microbatch).sums["sequences"].item()
        -2.0
    """

    weights: Callable[[Microbatch], Tensor]
    denominator: Denominator = "tokens"

    def __post_init__(self) -> None:
        if self.denominator not in get_args(Denominator):
            raise ValueError(f"denominator={self.denominator!r}: it is one of {', '.join(get_args(Denominator))}")

    def __call__(self, outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        """The loss of a microbatch.

        Args:
            outputs: log-probabilities under the model.
            microbatch: the microbatch that they are for.
        """
        weights = self._checked(microbatch).to(outputs.logprobs.dtype)
        logprobs = outputs.logprobs if weights.ndim == 1 else _of_ids(weights, outputs.at)
        return LossOutput(sums={self.denominator: torch.where(weights == 0, 0.0, weights * logprobs).sum()})

    def gradient(self, microbatch: Microbatch, counts: dict[Denominator, int], readout: Readout) -> Tensor:
        """The derivative of the loss of the global batch by every log-probability of a microbatch, [T] or [T, K],
        float64.

        Args:
            microbatch: one of the global batch.
            counts: denominators over the global batch.
            readout: what will be read.
        """
        weights = self._checked(microbatch)
        if weights.ndim == 2:
            _of_ids(weights, None if readout.ids is None else microbatch.values.get(readout.ids))
        return weights.double() / max(counts[self.denominator], 1)

    def _checked(self, microbatch: Microbatch) -> Tensor:
        weights = self.weights(microbatch)
        if weights.shape[:1] != microbatch.targets.shape or weights.ndim > 2:
            raise ValueError(
                f"the weights of a linear loss have shape {list(weights.shape)}: give one, or K, for each of the "
                f"microbatch's {microbatch.num_tokens} tokens"
            )
        return weights


def _of_ids(weights: Tensor, of_ids: Tensor | None) -> Tensor:
    """What belongs to the ids that are read, [T, K]. Raises ValueError if it is not as wide as the weights."""
    if of_ids is None or of_ids.shape != weights.shape:
        read = "none are read" if of_ids is None else f"{of_ids.shape[1]} are read"
        raise ValueError(
            f"the weights of a linear loss are for {weights.shape[1]} tokens at each place, and {read}: give "
            "Readout.ids the name of values with as many token ids"
        )
    return of_ids


def count(microbatches: Sequence[Microbatch]) -> dict[Denominator, int]:
    """Denominators of one data rank's microbatches. Masks that depend on results never enter, so that the denominators
    are known before any forward."""
    return {
        "tokens": sum(int(microbatch.loss_mask.sum()) for microbatch in microbatches),
        "sequences": sum(microbatch.num_sequences for microbatch in microbatches),
        "pairs": sum(microbatch.num_sequences for microbatch in microbatches) // 2,
        "positions": sum(microbatch.num_tokens for microbatch in microbatches if not microbatch.is_empty),
        "chosen_tokens": sum(
            int(mask.sum())
            for microbatch in microbatches
            for place, mask in zip(microbatch.order, microbatch.loss_mask.split(microbatch.lengths), strict=False)
            if place % 2 == 0
        ),
    }
