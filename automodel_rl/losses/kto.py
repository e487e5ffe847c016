"""The loss of single completions labelled good or bad (Kahneman-Tversky optimisation)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, TokenSequence, sum_by_sequence
from automodel_rl.config.losses import KTOLossConfig
from automodel_rl.losses.outputs import LossOutput, TokenOutputs

LABEL = "label"
"""Name of the value with a completion's label at every token: 1 for desirable, 0 for undesirable."""


def kto_loss(
    outputs: TokenOutputs, microbatch: Microbatch, config: KTOLossConfig, reference_point: float
) -> LossOutput:
    """Computes w (1 - sigmoid(beta (s - z))) for a desirable completion and w (1 - sigmoid(beta (z - s))) for an
    undesirable one, where s is the sum of log(policy / reference) over its tokens (Ethayarajh et al., arXiv:2402.01306,
    eq. 8).

    Args:
        outputs: log-probabilities under the policy.
        microbatch: `values` has `ref_logprobs` and `label`.
        config: settings.
        reference_point: z, the same for the whole global batch.

    Returns:
        A sum over sequences. Metrics: train/reward_desirable and train/reward_undesirable, the means of beta s over the
            completions of each kind; train/accuracy, the fraction on the correct side of z.

    Raises:
        ValueError: a value is missing.

    Example:
        >>> import torch
        >>> values = {"ref_logprobs": torch.zeros(2), "label": torch.ones(2)}
        >>> sequence = TokenSequence(torch.tensor([5, 6]), torch.tensor([False, True]), values)
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> outputs = TokenOutputs(torch.tensor([0.0, 0.0]))
        >>> kto_loss(outputs, microbatch, KTOLossConfig(), 0.0).sums["sequences"].item()  # 1 - sigmoid(0)
        0.5
    """
    for name in ("ref_logprobs", LABEL):
        if name not in microbatch.values:
            raise ValueError(
                f"kto_loss needs values[{name!r}] in the microbatch, which has {sorted(microbatch.values)}"
            )
    difference = outputs.logprobs.double() - microbatch.values["ref_logprobs"].double()
    scores = sum_by_sequence(torch.where(microbatch.loss_mask, difference, 0.0), microbatch)
    scores = scores[: microbatch.num_sequences]
    # Values are aligned with predicting positions, so the first position holds the label of the second token.
    is_good = microbatch.values[LABEL][microbatch.cu_seqlens[:-1].long()][: microbatch.num_sequences] > 0
    sign = torch.where(is_good, 1.0, -1.0).to(scores.dtype)
    weight = torch.full_like(scores, config.undesirable_weight).masked_fill(is_good, config.desirable_weight)
    loss = weight * torch.sigmoid(-sign * config.beta * (scores - reference_point))
    rewards, right = config.beta * scores.detach(), sign * (scores.detach() - reference_point) > 0
    metrics = {
        "train/reward_desirable": ((rewards * is_good).sum(), is_good.sum()),
        "train/reward_undesirable": ((rewards * ~is_good).sum(), (~is_good).sum()),
        "train/accuracy": (right.sum(), torch.ones_like(is_good).sum()),
    }
    return LossOutput({"sequences": loss.sum()}, metrics)


def mismatched(rows: Sequence[TokenSequence], capacity: int) -> list[TokenSequence]:
    """Returns each row's prompt with the completion of the previous row (for the first row, of the last). A completion
    starts at the first trained token. Skips rows whose prompts are equal, and rows with media. Truncates to `capacity`
    tokens."""
    starts = [int(row.loss_mask.nonzero()[0, 0]) if row.loss_mask.any() else len(row) for row in rows]
    found = []
    for place, row in enumerate(rows):
        other, start = rows[place - 1], starts[place - 1]
        prompt, completion = row.input_ids[: starts[place]], other.input_ids[start:]
        if torch.equal(prompt, other.input_ids[:start]) or not len(completion) or row.media or other.media:
            continue
        ids = torch.cat([prompt, completion])[:capacity]
        mask = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), other.loss_mask[start:]])[:capacity]
        if mask[1:].any():
            found.append(TokenSequence(ids, mask))
    return found


def reference_point(policy: Tensor, reference: Tensor) -> float:
    """Computes z: the mean of log(policy / reference) over mismatched completions, clamped to at least 0; 0 if there
    are none. Arguments are log-probabilities of whole completions, [N] each."""
    return max(0.0, (policy - reference).mean().item()) if len(policy) else 0.0
