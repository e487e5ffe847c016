"""The data of one forward and backward, or of several that meet in one pass, as microbatches with a loss."""

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from automodel_rl.batch import IGNORED_TARGET, Microbatch, TokenSequence, pack, pack_microbatch
from automodel_rl.losses import LossFn, LossOutput, TokenOutputs, token_loss
from automodel_rl.parallel.layout import Layout
from automodel_rl.serve.messages import Datum, ForwardBackward, LossResult

TARGETS, JOB = "target_tokens", "job"


class JointBatch:
    """The data of jobs, which are packed together, and the sum of their losses.

    Args:
        jobs: forwards and backwards, or forwards alone.

    Attributes:
        forward_only: whether they are forwards alone.
        loss: the sum of all losses.
    """

    def __init__(self, jobs: list[ForwardBackward]):
        self.jobs, self.forward_only = jobs, jobs[0].forward_only
        self.loss = _joint_loss(jobs)
        self._job_of = [number for number, job in enumerate(jobs) for _ in job.data]

    def pack(
        self, capacity: int, layout: Layout, cost: Callable[[int], float], gate: Tensor | None
    ) -> list[Microbatch]:
        """This data rank's microbatches. Their targets are those of the data.

        Args:
            capacity: most tokens of a microbatch.
            layout: this rank's place.
            cost: the work of a sequence by its length.
            gate: factors of the adapters' rows for tokens of each job, [jobs, rank]; None if there is one job.
        """
        names = dict.fromkeys(name for job in self.jobs for datum in job.data for name in datum.inputs)
        packed = pack(
            [_sequence(datum, names, number) for number, job in enumerate(self.jobs) for datum in job.data],
            capacity,
            share=layout.data_share,
            min_microbatches=layout.parallel.pp,
            cost=cost,
        )
        return [self._gated(_with_own_targets(microbatch), gate) for microbatch in packed]

    def results(self, total: float, logprobs: dict[int, Tensor]) -> list[LossResult]:
        """The result of each job.

        Args:
            total: the sum of all losses.
            logprobs: log-probabilities of each datum's targets, [n], by its place among the data of all jobs.
        """
        places = itertools.count()
        results = []
        for job in self.jobs:
            own = [logprobs[next(places)] for _ in job.data]
            loss = total if len(self.jobs) == 1 else _loss_of(job, own)
            results.append(LossResult(loss, [values.float().numpy() for values in own]))
        return results

    def _gated(self, microbatch: Microbatch, gate: Tensor | None) -> Microbatch:
        if gate is None:
            return microbatch
        if microbatch.is_empty:
            return dataclasses.replace(microbatch, adapter_gate=gate.new_zeros(microbatch.num_tokens, gate.shape[1]))
        rows = gate[[self._job_of[place] for place in microbatch.order]]
        spread = rows.repeat_interleave(torch.tensor(microbatch.lengths), 0)
        return dataclasses.replace(microbatch, adapter_gate=spread)


def _joint_loss(jobs: list[ForwardBackward]) -> LossFn:
    """The sum of the losses of jobs, over the tokens of each."""
    kinds: dict[tuple[str, tuple[tuple[str, float], ...]], list[int]] = {}
    for number, job in enumerate(jobs):
        kinds.setdefault((job.loss, tuple(sorted(job.settings.items()))), []).append(number)
    losses = [(token_loss(name, dict(settings)), torch.tensor(numbers)) for (name, settings), numbers in kinds.items()]
    if len(losses) == 1:
        return losses[0][0]

    def loss(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        job, sums = microbatch.values[JOB], []
        for one, numbers in losses:
            own = microbatch.loss_mask & torch.isin(job, numbers.to(job.device))
            sums.append(one(outputs, dataclasses.replace(microbatch, loss_mask=own)).sums["positions"])
        return LossOutput({"positions": torch.stack(sums).sum()})

    return loss


def _loss_of(job: ForwardBackward, logprobs: list[Tensor]) -> float:
    """The loss of a job from the log-probabilities of its targets."""
    microbatch = _with_own_targets(pack_microbatch([_sequence(datum, {}, 0) for datum in job.data]))
    outputs = TokenOutputs(torch.cat([part for values in logprobs for part in (values, values.new_zeros(1))]))
    return float(token_loss(job.loss, job.settings)(outputs, microbatch).sums["positions"])


def _sequence(datum: Datum, names: dict[str, None], job: int) -> TokenSequence:
    """A sequence of one token more, the last target, so that every target has a place as the token it stands for.

    Args:
        datum: the data.
        names: names of the inputs that it gets besides its own, as zeros.
        job: number of its job.
    """
    targets = torch.from_numpy(datum.inputs[TARGETS].copy())
    tokens = torch.cat([torch.from_numpy(datum.tokens.copy()), targets[-1:]])
    inputs = {name: torch.from_numpy(values.copy()) for name, values in datum.inputs.items()}
    values = dict.fromkeys(names, torch.zeros(len(datum))) | inputs
    values = {name: torch.cat([tensor.new_zeros(1), tensor]) for name, tensor in values.items()}
    values[JOB] = torch.full((len(tokens),), job)
    return TokenSequence(tokens, torch.ones(len(tokens), dtype=torch.bool), values)


def _with_own_targets(microbatch: Microbatch) -> Microbatch:
    values = dict(microbatch.values)
    targets = values.pop(TARGETS)
    is_last = microbatch.targets == IGNORED_TARGET
    return dataclasses.replace(microbatch, targets=torch.where(is_last, IGNORED_TARGET, targets), values=values)
