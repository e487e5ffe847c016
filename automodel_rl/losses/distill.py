"""The distillation loss: the divergence between a student's and a teacher's distribution for each token.

Shape letters: T tokens, K tokens of the vocabulary that are compared individually at each position.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch
from automodel_rl.config.distillation import DistillLossConfig
from automodel_rl.losses.outputs import LossFn, LossOutput, TokenOutputs

IDS, TEACHER = "compared_ids", "teacher_logprobs"
"""Names of values: compared tokens, int64 [T, K], -1 for none; and the teacher's log-probabilities of them, [T, K]."""

NO_TOKEN = -100.0
"""Log-probability used where there is no token to compare."""

SMALLEST_TAIL = 1e-7
"""Minimum total probability of the tokens that are not compared, which keeps logarithm and gradient finite."""


def distill_loss(outputs: TokenOutputs, microbatch: Microbatch, config: DistillLossConfig) -> LossOutput:
    """Computes the divergence for each token in `loss_mask`. See `DistillLossConfig` for formulas and papers.

    Args:
        outputs: the student's log-probabilities, read with `Readout(config.temperature, ids=IDS)`.
        microbatch: `values` has `compared_ids`, and `teacher_logprobs`, normalised over the whole vocabulary at
            `config.temperature`.
        config: settings. If the whole vocabulary is compared, `outside` must be drop.

    Returns:
        A sum over tokens, float64. Metrics, as means over tokens: train/divergence; train/teacher_mass and
            train/student_mass, the total probability of the compared tokens; and, with config.scaled_likelihood,
            train/scaled_likelihood_loss, -log p(token) at `config.temperature`.

    Raises:
        ValueError: a required value or output is missing.

    Example:
        >>> import torch
        >>> teacher = torch.tensor([[1.0, 1.0], [0.5, 0.25]]).log()
        >>> values = {"compared_ids": torch.tensor([[-1, -1], [8, 9]]), "teacher_logprobs": teacher}
        >>> sequence = TokenSequence(torch.tensor([5, 8]), torch.tensor([False, True]), values)
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> student = torch.tensor([[0.25, 0.25], [1.0, 1.0]]).log()  # at the place that predicts the second token
        >>> loss = distill_loss(TokenOutputs(student[:, 0], ids_logprobs=student), microbatch, DistillLossConfig())
        >>> round(loss.sums["tokens"].item(), 4)  # 0.5 log(0.5 / 0.25), and 0.25 log(0.25 / 0.5) of all others
        0.1733
    """
    if outputs.ids_logprobs is None or TEACHER not in microbatch.values:
        raise ValueError(
            f"distill_loss needs values {IDS!r} and {TEACHER!r}, and the student's log-probabilities of the former: "
            f"read them with Readout(ids={IDS!r})"
        )
    counted = microbatch.loss_mask
    student, teacher = (
        _usable(logprobs.double(), microbatch) for logprobs in (outputs.ids_logprobs, microbatch.values[TEACHER])
    )
    divergence = DIVERGENCES[config.divergence](
        _completed(student, config.outside), _completed(teacher, config.outside), config.beta
    )
    loss, per_token = divergence, {"train/divergence": divergence}
    if config.scaled_likelihood:
        loss = loss - config.scaled_likelihood * outputs.logprobs.double()
        per_token["train/scaled_likelihood_loss"] = -outputs.logprobs.double()
    per_token |= {"train/teacher_mass": teacher.exp().sum(1), "train/student_mass": student.exp().sum(1)}
    count = counted.sum()
    metrics = {name: (torch.where(counted, v.detach(), 0.0).sum(), count) for name, v in per_token.items()}
    return LossOutput({"tokens": torch.where(counted, loss, 0.0).sum()}, metrics)


def with_divergence(
    outputs: TokenOutputs, microbatch: Microbatch, loss: LossFn, config: DistillLossConfig, coefficient: float
) -> LossOutput:
    """Adds `coefficient` times the distillation loss to another loss, and merges their metrics."""
    own, of_teacher = loss(outputs, microbatch), distill_loss(outputs, microbatch, config)
    tokens = own.sums.get("tokens", 0.0) + coefficient * of_teacher.sums["tokens"]
    return dataclasses.replace(own, sums={**own.sums, "tokens": tokens}, metrics=own.metrics | of_teacher.metrics)


def _usable(logprobs: Tensor, microbatch: Microbatch) -> Tensor:
    """Masks log-probabilities of the compared tokens, [T, K]: next to no probability where there is no token, and a
    fixed distribution outside `loss_mask`, where the input may be undefined."""
    logprobs = torch.where(microbatch.values[IDS] >= 0, logprobs, NO_TOKEN)
    return torch.where(microbatch.loss_mask[:, None], logprobs, -math.log(2 * logprobs.shape[1]))


def _completed(logprobs: Tensor, outside: str) -> Tensor:
    """Accounts for all tokens that are not compared, in log-probabilities [T, K]."""
    if outside == "drop":
        return logprobs
    total = logprobs.logsumexp(1, keepdim=True)
    if outside == "renormalise":
        return logprobs - total
    tail = (-torch.expm1(total.clamp_max(math.log1p(-SMALLEST_TAIL)))).log()
    return torch.cat([logprobs, tail], dim=1)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Computes sum(first * log(first / second)) from log-probabilities [T, K]: [T]."""
    return (first.exp() * (first - second)).sum(1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta in (0.0, 1.0):  # the limits that other packages also use; the formula itself would give 0
        return _kl(teacher, student) if beta == 0.0 else _kl(student, teacher)
    middle = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda student, teacher, _: _kl(teacher, student),
    "reverse_kl": lambda student, teacher, _: _kl(student, teacher),
    "jsd": _jsd,
    "mixed": lambda student, teacher, beta: beta * _kl(teacher, student) + (1 - beta) * _kl(student, teacher),
}
"""Divergences of the student's log-probabilities from the teacher's, [T, K] each, with `beta`: [T]."""


def teacher_advantages(old: Tensor, teacher: Tensor, mask: Tensor, coefficient: float, discount: float) -> Tensor:
    """Computes advantages from a teacher: coefficient * (log q - log p) plus the discounted terms of later tokens,
    float64 [n].

    Args:
        old: log-probabilities as sampled, [n].
        teacher: log-probabilities under the teacher, [n].
        mask: bool [n], tokens that count; others get 0.
        coefficient: factor of the log-ratio.
        discount: discount per token; 0 for each token's own term only.
    """
    own = torch.where(mask, coefficient * (teacher.double() - old.double()), 0.0)
    if discount == 0.0:
        return own
    total, found = own.new_zeros(()), torch.empty_like(own)
    for place in reversed(range(len(own))):
        total = own[place] + discount * total
        found[place] = total
    return torch.where(mask, found, 0.0)
