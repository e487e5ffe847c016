"""The data of one forward and backward, or of several that meet in one pass, as microbatches with a loss."""

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
    """The data of jobs, which are packed together, and the sum of their losses.

    Args:
        jobs: forwards and backwards, or forwards alone.

    Attributes:
        rows: the data of all jobs.
        run_of: the number of the job of each row.
        loss: the sum of all losses.
        readout: what the losses get for every token.
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
        """The result of each job.

        Args:
            total: the sum of all losses.
            logprobs: log-probabilities of the targets of each row, [n] or [n, width], by its number.
        """
        places = itertools.count()
        results = []
        for job in self.jobs:
            own = [_own(logprobs[next(places)], datum.width) for datum in job.data]
            loss = total if len(self.jobs) == 1 else _loss_of(job, own)
            results.append(LossResult(loss, [values.float().numpy() for values in own]))
        return results


def gated(microbatch: Microbatch, gate: Tensor | None, run_of: Sequence[int]) -> Microbatch:
    """The microbatch with factors of the adapters' rows for its tokens.

    Args:
        microbatch: the microbatch.
        gate: the factors for tokens of each run, [runs, rank]; None if there is one run.
        run_of: the run of each row of the batch.
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


def _own(logprobs: Tensor, width: int) -> Tensor:
    """The log-probabilities of a datum with so many targets for each token, of those that a pass has read."""
    if logprobs.ndim == 1:
        return logprobs
    return logprobs[:, :width] if width else logprobs[:, 0]


def _loss_of(job: RunPass, logprobs: list[Tensor]) -> float:
    """The loss of a job from the log-probabilities of its targets."""
    microbatch = with_own_targets(pack_microbatch([_sequence(datum, {}, 0, job.width) for datum in job.data]))
    rows = torch.cat([functional.pad(_wide(values, job.width, 0.0), (0, 0, 0, 1)) for values in logprobs])
    outputs = TokenOutputs(rows[:, 0], at=rows if job.width else None)
    return float(token_loss(job.loss, job.settings)(outputs, microbatch).sums["positions"])


def _wide(values: Tensor, width: int, filling: float) -> Tensor:
    """Values of a datum's targets, [n] or [n, K], as columns [n, max(width, 1)]."""
    columns = values.view(len(values), -1)
    return functional.pad(columns, (0, max(width, 1) - columns.shape[1]), value=filling)


def _sequence(datum: Datum, names: dict[str, None], job: int, width: int) -> TokenSequence:
    """A sequence of one token more, the last target, so that every target has a place as the token it stands for.

    Args:
        datum: the data.
        names: names of the inputs that it gets besides its own, as zeros.
        job: number of its job.
        width: number of targets of a token that are read; 0 for one.
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
    """The microbatch with the targets that come with its rows."""
    values = dict(microbatch.values)
    targets = values.pop(TARGETS)
    is_last = microbatch.targets == IGNORED_TARGET
    return dataclasses.replace(microbatch, targets=torch.where(is_last, IGNORED_TARGET, targets), values=values)
