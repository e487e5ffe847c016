"""A loss that also notes the log-probabilities it gets, for the client."""

from dataclasses import dataclass, field

from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.losses import LinearLoss, LossFn, LossOutput, TokenOutputs


def recorded(loss: LossFn, found: dict[int, Tensor]) -> LossFn:
    """The same loss, which notes the log-probabilities of targets.

    Args:
        loss: the loss.
        found: gets them by the sequence's place in the list that was packed: [n - 1], or [n - 1, K] where several are
            read for each, without those of the last position, which has no target.
    """
    if isinstance(loss, LinearLoss):
        return _RecordedLinearLoss(loss.weights, loss.denominator, found)

    def record(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        _note(found, outputs, microbatch)
        return loss(outputs, microbatch)

    return record


@dataclass(frozen=True)
class _RecordedLinearLoss(LinearLoss):
    found: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        _note(self.found, outputs, microbatch)
        return super().__call__(outputs, microbatch)


def _note(found: dict[int, Tensor], outputs: TokenOutputs, microbatch: Microbatch) -> None:
    if microbatch.is_empty:
        return
    logprobs = outputs.logprobs if outputs.at is None else outputs.at
    pieces = logprobs.detach().split(microbatch.lengths)
    for place, piece in zip(microbatch.order, pieces, strict=True):
        found[place] = piece[:-1]
