"""The loss of reward models, over pairs: chosen and rejected are neighbours in a microbatch, the chosen one first."""

import torch.nn.functional as F
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.config.losses import RewardLossConfig
from automodel_rl.losses.outputs import LossOutput, TokenOutputs
from automodel_rl.losses.terms import check_pairs


def reward_loss(outputs: TokenOutputs, microbatch: Microbatch, config: RewardLossConfig) -> LossOutput:
    """The Bradley-Terry loss -log sigmoid(r_chosen - r_rejected - margin) of pairs, with r the score that a linear head
    gives after the last token of a sequence (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1).

    Args:
        outputs: scores, read with `Readout(scores=True)`; the first of each token counts.
        microbatch: whole pairs. If `values` has `margin`, it is the pair's, at every token of the chosen sequence.
        config: the settings of the loss.

    Returns:
        A sum over pairs, float64. Metrics: means over pairs of train/accuracy, train/score_margin, train/score_chosen
        and train/score_rejected.

    Raises:
        ValueError: there are no scores, or the sequences are no whole pairs.

    Example:
        >>> import torch
        >>> rows = [TokenSequence(torch.tensor([5, 6, token]), torch.ones(3, dtype=torch.bool)) for token in (7, 8)]
        >>> (microbatch,) = pack(rows, capacity=8, together=2)
        >>> scores = torch.tensor([[0.0], [0.0], [2.0], [0.0], [0.0], [1.0]])  # after the last tokens: 2 and 1
        >>> loss = reward_loss(TokenOutputs(torch.zeros(0), scores=scores), microbatch, RewardLossConfig())
        >>> round(loss.sums["pairs"].item(), 4)  # -log sigmoid(1)
        0.3133
    """
    if outputs.scores is None:
        raise ValueError("reward_loss needs the scores of a linear head: read them with Readout(scores=True)")
    check_pairs(microbatch)
    starts, ends = microbatch.cu_seqlens[:-1].long(), microbatch.cu_seqlens[1:].long() - 1
    scores = _pairs(outputs.scores[ends, 0].double(), microbatch)
    difference = scores[:, 0] - scores[:, 1]
    advantage = difference
    if "margin" in microbatch.values:
        # A value stands at the position before its token, so the first position has that of the second token.
        advantage = difference - _pairs(microbatch.values["margin"][starts].double(), microbatch)[:, 0]
    loss = -F.logsigmoid(advantage) + config.centring * scores.sum(1).square()
    per_pair = {
        "train/accuracy": (difference > 0).to(loss.dtype),
        "train/score_margin": difference,
        "train/score_chosen": scores[:, 0],
        "train/score_rejected": scores[:, 1],
    }
    count = loss.new_tensor(float(len(loss)))
    return LossOutput({"pairs": loss.sum()}, {name: (v.detach().sum(), count) for name, v in per_pair.items()})


def _pairs(of_sequences: Tensor, microbatch: Microbatch) -> Tensor:
    """Values of sequences, [N], by pairs, [pairs, 2]. An empty microbatch has no pair."""
    return of_sequences[: microbatch.num_sequences].view(-1, 2)
