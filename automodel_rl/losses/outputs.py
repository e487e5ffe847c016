"""Inputs and outputs of losses. Losses return sums, never means; `PPLossAdapter` divides them by global counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch

Denominator = Literal["tokens", "sequences", "pairs", "positions", "chosen_tokens"]
"""Divisor of a sum, counted over the global batch. "tokens": targets with `loss_mask` set; "sequences": real sequences;
"pairs": half their number; "positions": all their tokens; "chosen_tokens": targets with `loss_mask` set in the first
sequence of each pair."""

UNDIVIDED: dict[Denominator, int] = dict.fromkeys(get_args(Denominator), 1)
"""Counts that leave sums undivided."""


@dataclass(frozen=True)
class Readout:
    """Quantities computed from the model's final logits for every token.

    Attributes:
        temperature: divides the logits before the softmax.
        entropy: whether to compute the softmax's entropy.
        ids: name of values [T, K] of token ids, int64, -1 for none, whose log-probabilities are computed besides the
            target's; None for the target only.
        scores: whether to return the outputs of a linear head, which replaces the vocabulary's.
        mtp: whether to compute the log-probability of the token after the next, by the model's MTP layer.

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
                f"temperature={self.temperature}: logits are divided by it, so it must be above 0; for the most likely "
                "token use Engine.next_tokens"
            )


@dataclass(frozen=True)
class TokenOutputs:
    """Model outputs for one microbatch, as seen by a loss. Fields that the `Readout` did not request are None.

    Attributes:
        logprobs: log-probability of every target, [T], fp32 or float64; 0 where there is no target; [0] if scores were
            read.
        entropy: entropy of the model's distribution over the target in nats, [T]; 0 where there is no target.
        ids_logprobs: log-probabilities of the tokens of `Readout.ids`, [T, K]; 0 where there is no such token or no
            target.
        scores: outputs of a linear head at every token itself, not at its predictor, [T, L].
        mtp: log-probability of the token after the next under the MTP layer, [T]; 0 where there is none.

    Example:
        >>> import torch
        >>> TokenOutputs(logprobs=torch.tensor([-0.5, -1.5, 0.0])).entropy is None
        True
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    ids_logprobs: Tensor | None = None
    scores: Tensor | None = None
    mtp: Tensor | None = None

    @classmethod
    def from_columns(cls, columns: Tensor, readout: Readout) -> "TokenOutputs":
        """Splits `columns`, the result of a `readout`: [T, 1] log-probabilities, followed by K columns of ids, one of
        entropies and one of MTP, as far as requested; or [T, L] scores."""
        if readout.scores:
            return cls(columns.new_zeros(0), scores=columns)
        end = columns.shape[1] - readout.entropy - readout.mtp
        entropy = columns[:, end] if readout.entropy else None
        ids_logprobs = None if readout.ids is None else columns[:, 1:end]
        return cls(columns[:, 0], entropy, ids_logprobs, mtp=columns[:, -1] if readout.mtp else None)


@dataclass(frozen=True)
class LossOutput:
    """Sums over one microbatch.

    Attributes:
        sums: scalar tensors with gradients, by their divisor: "tokens" (targets with `loss_mask` set), "sequences",
            "pairs" (half the sequences), "positions" (all tokens of the sequences) or "chosen_tokens" ("tokens" of the
            first sequence of each pair), counted over the global batch. The loss is the total of the quotients.
        metrics: name -> (sum, denominator), scalar tensors without gradient, which are each summed over microbatches
            and ranks before the division.
        largest, smallest: name -> scalar tensor without gradient, whose maximum or minimum over microbatches and ranks
            is the metric.
        auxiliary: like `sums`, for an auxiliary objective that is trained but not part of the reported loss.

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
    auxiliary: dict[Denominator, Tensor] = field(default_factory=dict)


LossFn = Callable[[TokenOutputs, Microbatch], LossOutput]


@dataclass(frozen=True)
class LinearLoss:
    """A loss that is a weighted sum of log-probabilities, with weights independent of the model.

    Its gradient is known before the forward, so the head computes gradients while it has the logits rather than
    recomputing them. Like any loss, it is called with `outputs` and a `microbatch`.

    Attributes:
        weights: returns the weights of a microbatch: [T] for the log-probabilities of the targets, or [T, K] for those
            of `Readout.ids`.
        denominator: divisor of the sum.

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
            raise ValueError(f"denominator={self.denominator!r}: it must be one of {', '.join(get_args(Denominator))}")

    def __call__(self, outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        """Computes the loss from `outputs` of the `microbatch`."""
        weights = self._checked(microbatch).to(outputs.logprobs.dtype)
        logprobs = outputs.logprobs if weights.ndim == 1 else _of_ids(weights, outputs.ids_logprobs)
        return LossOutput(sums={self.denominator: torch.where(weights == 0, 0.0, weights * logprobs).sum()})

    def gradient(self, microbatch: Microbatch, counts: dict[Denominator, int], readout: Readout) -> Tensor:
        """Returns the derivative of the global batch's loss with respect to each log-probability of a `microbatch`, [T]
        or [T, K], float64. `counts` are the global denominators, `readout` is the planned readout."""
        weights = self._checked(microbatch)
        if weights.ndim == 2:
            _of_ids(weights, None if readout.ids is None else microbatch.values.get(readout.ids))
        return weights.double() / max(counts[self.denominator], 1)

    def _checked(self, microbatch: Microbatch) -> Tensor:
        weights = self.weights(microbatch)
        if weights.shape[:1] != microbatch.targets.shape or weights.ndim > 2:
            raise ValueError(
                f"the weights of a linear loss have shape {list(weights.shape)}: pass one, or K, for each of the "
                f"microbatch's {microbatch.num_tokens} tokens"
            )
        return weights


def _of_ids(weights: Tensor, of_ids: Tensor | None) -> Tensor:
    """Checks that `of_ids` [T, K] has the shape of the weights, and returns it. Raises ValueError otherwise."""
    if of_ids is None or of_ids.shape != weights.shape:
        read = "none are read" if of_ids is None else f"{of_ids.shape[1]} are read"
        raise ValueError(
            f"the weights of a linear loss are for {weights.shape[1]} tokens at each position, but {read}: set "
            "Readout.ids to the name of values with equally many token ids"
        )
    return of_ids


def count(microbatches: Sequence[Microbatch]) -> dict[Denominator, int]:
    """Counts the denominators of one data rank's microbatches. They never depend on results, so they are known before
    any forward."""
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
