"""The loss of reward models over pairs. Chosen and rejected are adjacent in a microbatch, the chosen one first."""

import torch.nn.functional as F
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.config.losses import RewardLossConfig
from automodel_rl.losses.outputs import LossOutput, TokenOutputs
from automodel_rl.losses.terms import check_pairs


def reward_loss(outputs: TokenOutputs, microbatch: Microbatch, config: RewardLossConfig) -> LossOutput:
    """Computes the Bradley-Terry loss -log sigmoid(r_chosen - r_rejected - margin) of pairs, where r is the output of a
    linear head at a sequence's last token (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1).

    Args:
        outputs: scores, read with `Readout(scores=True)`; only the first per token is used.
        microbatch: whole pairs. Optional `margin` in `values` holds the pair's margin at every token of the chosen
            sequence.
        config: settings.

    Returns:
        A sum over pairs, float64. Metrics, as means over pairs: train/accuracy, train/score_margin, train/score_chosen
            and train/score_rejected.

    Raises:
        ValueError: there are no scores, or the sequences are not whole pairs.

    Example:
        >>> import torch
        >>> rows = [TokenSequence(torch.tensor([5, 6, token]), torch.ones(3, dtype=torch.bool)) for token in (7, 8)]
        >>> (microbatch,) = pack(rows, capacity=8, sequences_per_example=2)
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
        # Values are aligned with predicting positions, so the first position holds that of the second token.
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
    """Reshapes values of sequences [N] to [pairs, 2]. An empty microbatch has no pairs."""
    return of_sequences[: microbatch.num_sequences].view(-1, 2)
