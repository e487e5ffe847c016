"""The loss of distillation: a divergence between a student's distribution and a teacher's, token by token.

Shape letters: T tokens, K tokens of the vocabulary that are compared one by one at each place.
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
"""Names of values: the compared tokens, int64 [T, K], -1 for none, and the teacher's log-probabilities of them,
[T, K]."""

NO_TOKEN = -100.0
"""Log-probability that stands where there is no token to compare."""

SMALLEST_TAIL = 1e-7
"""Least probability of all tokens that are not compared, for a finite logarithm and gradient."""


def distill_loss(outputs: TokenOutputs, microbatch: Microbatch, config: DistillLossConfig) -> LossOutput:
    """The divergence of each counted token. Formulas and papers are in `DistillLossConfig`.

    Args:
        outputs: the student's log-probabilities, read with `Readout(config.temperature, ids=IDS)`.
        microbatch: `values` has `compared_ids` and `teacher_logprobs`, true log-probabilities over the whole
            vocabulary at `config.temperature`.
        config: the settings of the loss. If all tokens of the vocabulary are compared, `outside` must be drop.

    Returns:
        A sum over tokens, float64. Metrics: means over tokens of train/divergence, and of train/teacher_mass and
        train/student_mass, the probability that the compared tokens have together; with config.scaled_likelihood
        also of train/scaled_likelihood_loss, -log p(token) at `config.temperature`.

    Raises:
        ValueError: the microbatch or the outputs lack something.

    Example:
        >>> import torch
        >>> teacher = torch.tensor([[1.0, 1.0], [0.5, 0.25]]).log()
        >>> values = {"compared_ids": torch.tensor([[-1, -1], [8, 9]]), "teacher_logprobs": teacher}
        >>> sequence = TokenSequence(torch.tensor([5, 8]), torch.tensor([False, True]), values)
        >>> (microbatch,) = pack([sequence], capacity=8)
        >>> student = torch.tensor([[0.25, 0.25], [1.0, 1.0]]).log()  # at the place that predicts the second token
        >>> loss = distill_loss(TokenOutputs(student[:, 0], at=student), microbatch, DistillLossConfig())
        >>> round(loss.sums["tokens"].item(), 4)  # 0.5 log(0.5 / 0.25), and 0.25 log(0.25 / 0.5) of all others
        0.1733
    """
    if outputs.at is None or TEACHER not in microbatch.values:
        raise ValueError(
            f"distill_loss needs values {IDS!r} and {TEACHER!r}, and the student's log-probabilities of the former: "
            f"read them with Readout(ids={IDS!r})"
        )
    counted = microbatch.loss_mask
    student, teacher = (_usable(logprobs.double(), microbatch) for logprobs in (outputs.at, microbatch.values[TEACHER]))
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
    """A loss and, with a factor, the divergence of each counted token.

    Args:
        outputs: what both losses need.
        microbatch: the microbatch, with what both need.
        loss: the other loss.
        config: the settings of the divergence, as for `distill_loss`.
        coefficient: its factor.

    Returns:
        The sum of both, and the metrics of both.
    """
    own, of_teacher = loss(outputs, microbatch), distill_loss(outputs, microbatch, config)
    tokens = own.sums.get("tokens", 0.0) + coefficient * of_teacher.sums["tokens"]
    return dataclasses.replace(own, sums={**own.sums, "tokens": tokens}, metrics=own.metrics | of_teacher.metrics)


def _usable(logprobs: Tensor, microbatch: Microbatch) -> Tensor:
    """Log-probabilities of the compared tokens, [T, K]; with next to no probability where there is no token, and of a
    fixed distribution where nothing counts: what is read there may be none."""
    logprobs = torch.where(microbatch.values[IDS] >= 0, logprobs, NO_TOKEN)
    return torch.where(microbatch.loss_mask[:, None], logprobs, -math.log(2 * logprobs.shape[1]))


def _completed(logprobs: Tensor, outside: str) -> Tensor:
    """Log-probabilities of the compared tokens, [T, K], with what stands for all others."""
    if outside == "drop":
        return logprobs
    total = logprobs.logsumexp(1, keepdim=True)
    if outside == "renormalise":
        return logprobs - total
    tail = (-torch.expm1(total.clamp_max(math.log1p(-SMALLEST_TAIL)))).log()
    return torch.cat([logprobs, tail], dim=1)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """sum of first * log(first / second) from log-probabilities [T, K]: [T]."""
    return (first.exp() * (first - second)).sum(1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta in (0.0, 1.0):  # the limits that packages agree on; the formula itself would give 0
        return _kl(teacher, student) if beta == 0.0 else _kl(student, teacher)
    middle = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": lambda student, teacher, _: _kl(teacher, student),
    "reverse_kl": lambda student, teacher, _: _kl(student, teacher),
    "jsd": _jsd,
    "mixed": lambda student, teacher, beta: beta * _kl(teacher, student) + (1 - beta) * _kl(student, teacher),
}
"""Divergences of a student's log-probabilities from a teacher's, [T, K] each, with `beta`: [T]."""


def teacher_advantages(old: Tensor, teacher: Tensor, mask: Tensor, coefficient: float, discount: float) -> Tensor:
    """Advantages of a row's tokens by a teacher: coefficient * (log q - log p), with what later tokens get, discounted.

    Args:
        old: log-probabilities of the tokens as they were sampled, [n].
        teacher: those under the teacher, [n].
        mask: the tokens that count, bool [n].
        coefficient: the factor.
        discount: factor for every token in between; 0 for a token's own alone.

    Returns:
        float64 [n]; 0 for tokens that do not count.
    """
    own = torch.where(mask, coefficient * (teacher.double() - old.double()), 0.0)
    if discount == 0.0:
        return own
    total, found = own.new_zeros(()), torch.empty_like(own)
    for place in reversed(range(len(own))):
        total = own[place] + discount * total
        found[place] = total
    return torch.where(mask, found, 0.0)
