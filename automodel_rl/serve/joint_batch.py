"""Microbatches and loss of one forward-backward job, or of several that run in one pass."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from automodel_rl.batch import IGNORED_TARGET, Batch, Microbatch, TokenSequence, pack_microbatch
from automodel_rl.batch.tensors import ADAPTER_GATE
from automodel_rl.losses import LossFn, LossOutput, Readout, TokenOutputs, token_loss
from automodel_rl.serve.messages import TARGETS, Datum, LossResult, RunPass

JOB, IDS, WEIGHTS = "job", "target_ids", "weights"


class JointBatch:
    """The data of jobs, packed together, and the sum of their losses.

    Attributes:
        rows: the datums of all jobs.
        run_of: index of each row's job.
        loss: sum of all losses.
        readout: per-token outputs that the losses read.
    """

    def __init__(self, jobs: list[RunPass]):
        self.jobs = jobs
        self.loss = _joint_loss(jobs)
        self.width = max(job.width for job in jobs)
        self.readout = Readout(ids=IDS if self.width else None)
        names = dict.fromkeys(name for job in jobs for datum in job.data for name in datum.inputs)
        self.run_of = [number for number, job in enumerate(jobs) for _ in job.data]
        data = zip((datum for job in jobs for datum in job.data), self.run_of, strict=True)
        self.rows = Batch(_sequence(datum, names, number, self.width) for datum, number in data)

    def results(self, total: float, logprobs: dict[int, Tensor]) -> list[LossResult]:
        """Returns each job's result.

        Args:
            total: sum of all losses.
            logprobs: log-probabilities of each row's targets, [n] or [n, width], by row.
        """
        places = itertools.count()
        results = []
        for job in self.jobs:
            own = [_own(logprobs[next(places)], datum.width) for datum in job.data]
            loss = total if len(self.jobs) == 1 else _loss_of(job, own)
            results.append(LossResult(loss, [values.float().numpy() for values in own]))
        return results


def gated(microbatch: Microbatch, gate: Tensor | None, run_of: Sequence[int]) -> Microbatch:
    """Adds the factors of the adapters' rows to a microbatch's tokens.

    Args:
        gate: factors for tokens of each run, [runs, rank]; None for a single run.
        run_of: index of each row's run.
    """
    if gate is None:
        return microbatch
    if microbatch.is_empty:
        spread = gate.new_zeros(microbatch.num_tokens, gate.shape[1])
    else:
        rows = gate[[run_of[row] for row in microbatch.order]]
        spread = rows.repeat_interleave(torch.tensor(microbatch.lengths), 0)
    return dataclasses.replace(microbatch, tokens={**microbatch.tokens, ADAPTER_GATE: spread})


def _joint_loss(jobs: list[RunPass]) -> LossFn:
    """The sum of the jobs' losses, each over its own tokens."""
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


def _own(logprobs: Tensor, width: int) -> Tensor:
    """Cuts log-probabilities to a datum's own number of targets per token."""
    if logprobs.ndim == 1:
        return logprobs
    return logprobs[:, :width] if width else logprobs[:, 0]


def _loss_of(job: RunPass, logprobs: list[Tensor]) -> float:
    microbatch = with_own_targets(pack_microbatch([_sequence(datum, {}, 0, job.width) for datum in job.data]))
    rows = torch.cat([functional.pad(_wide(values, job.width, 0.0), (0, 0, 0, 1)) for values in logprobs])
    outputs = TokenOutputs(rows[:, 0], ids_logprobs=rows if job.width else None)
    return float(token_loss(job.loss, job.settings)(outputs, microbatch).sums["positions"])


def _wide(values: Tensor, width: int, filling: float) -> Tensor:
    """Pads values of a datum's targets, [n] or [n, K], to [n, max(width, 1)]."""
    columns = values.view(len(values), -1)
    return functional.pad(columns, (0, max(width, 1) - columns.shape[1]), value=filling)


def _sequence(datum: Datum, names: dict[str, None], job: int, width: int) -> TokenSequence:
    """Builds a sequence with the last target appended, so that every target has an index as a predicted token.

    Args:
        names: inputs to add as zeros if the datum lacks them.
        job: index of its job.
        width: targets read per token; 0 for one.
    """
    inputs = {name: torch.from_numpy(values.copy()) for name, values in datum.inputs.items()}
    targets = _wide(inputs[TARGETS], width, -1)
    tokens = torch.cat([torch.from_numpy(datum.tokens.copy()), targets[-1:, 0]])
    values = dict.fromkeys(names, torch.zeros(len(datum))) | inputs | {TARGETS: targets[:, 0]}
    if width:
        values[IDS] = targets
        if WEIGHTS in values:
            values[WEIGHTS] = _wide(values[WEIGHTS], width, 0.0)
    values = {name: torch.cat([tensor.new_zeros(1, *tensor.shape[1:]), tensor]) for name, tensor in values.items()}
    values[JOB] = torch.full((len(tokens),), job)
    return TokenSequence(tokens, torch.ones(len(tokens), dtype=torch.bool), values)


def with_own_targets(microbatch: Microbatch) -> Microbatch:
    values = dict(microbatch.values)
    targets = values.pop(TARGETS)
    is_last = microbatch.targets == IGNORED_TARGET
    return dataclasses.replace(microbatch, targets=torch.where(is_last, IGNORED_TARGET, targets), values=values)
