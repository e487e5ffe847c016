"""Batching of waiting jobs: samples from the same weights, and forward-backward passes of several runs."""

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

from automodel_rl.rollout.sampled import Refused
from automodel_rl.serve.messages import (
    CombinedPass,
    Forget,
    RunMethodCall,
    RunPass,
    SampleJob,
    ServiceJob,
    TeacherJob,
)

MAX_SEQUENCES = 1024
"""Most completions of sample jobs that run as one."""

MAX_SCORES = 2**24
"""Most token scores of jobs that run as one. Every position counts with the largest number requested."""

MAX_TARGETS = 2**22
"""Most targets in one pass in which some tokens have several."""


def take_batch(waiting: deque[Any], pass_tokens: int) -> list[Any]:
    """Removes the first order from the queue, and all orders that can run in the same pass.

    Args:
        waiting: at least one order, each with a `job`.
        pass_tokens: most tokens of forward-backward jobs that run as one; 0 runs each alone.
    """
    first = waiting.popleft()
    taken, left = [first], []
    joint: _JointSample | _JointPass
    match first.job:
        case SampleJob() | TeacherJob():
            joint = _JointSample(first.job)
        case RunPass() if pass_tokens:
            joint = _JointPass(first.job, pass_tokens)
        case _:
            return taken
    passed = {*_runs_of(first.job)}  # a job must not overtake an earlier one of its run
    for order in waiting:
        runs = _runs_of(order.job)
        if passed.isdisjoint(runs) and joint.takes(order.job):
            taken.append(order)
        else:
            left.append(order)
        passed.update(runs)
    waiting.clear()
    waiting.extend(left)
    return taken


def joined(jobs: list[Any]) -> ServiceJob:
    if len(jobs) == 1:
        return jobs[0]
    if isinstance(jobs[0], RunPass):
        return CombinedPass(jobs)
    return dataclasses.replace(jobs[0], prompts=[prompt for job in jobs for prompt in job.prompts])


def answers_of(jobs: list[Any], answer: Any) -> Iterable[Any]:
    """Splits a joint answer into those of the jobs. A sample job with any refused prompt is refused."""
    if isinstance(jobs[0], (SampleJob, TeacherJob)):
        rest = iter(answer)
        return [_all_or_refused([next(rest) for _ in job.prompts]) for job in jobs]
    return [answer] if len(jobs) == 1 else answer


def _all_or_refused(answers: list[Any]) -> Any:
    return next((one for one in answers if isinstance(one, Refused)), answers)


class _JointSample:
    """Samples from the same weights, or scores by the same teacher."""

    def __init__(self, first: SampleJob | TeacherJob):
        self.weights, self.count = _weights(first), _num_sequences(first)
        self.scored, self.widest = _num_scored(first), _widest(first)

    def takes(self, job: ServiceJob) -> bool:
        """Adds a job if it fits. Returns whether it does."""
        if not isinstance(job, (SampleJob, TeacherJob)) or _weights(job) != self.weights:
            return False
        scored, widest = self.scored + _num_scored(job), max(self.widest, _widest(job))
        if self.count + _num_sequences(job) > MAX_SEQUENCES or scored * widest > MAX_SCORES:
            return False
        self.count, self.scored, self.widest = self.count + _num_sequences(job), scored, widest
        return True


class _JointPass:
    """Forward-backward or forward-only jobs of runs whose adapters have no common row."""

    def __init__(self, first: RunPass, most: int):
        self.forward_only, self.most = first.forward_only, most
        self.tokens, self.width, self.rows = _num_tokens(first), first.width, {*_rows(first)}

    def takes(self, job: ServiceJob) -> bool:
        """Adds a job if it fits. Returns whether it does."""
        if not isinstance(job, RunPass) or job.forward_only != self.forward_only:
            return False
        tokens, width = self.tokens + _num_tokens(job), max(self.width, job.width)
        if tokens > self.most or tokens * width > MAX_TARGETS or not self.rows.isdisjoint(_rows(job)):
            return False
        self.tokens, self.width = tokens, width
        self.rows.update(_rows(job))
        return True


def _weights(job: SampleJob | TeacherJob) -> tuple[str | None, ...]:
    return (job.teacher,) if isinstance(job, TeacherJob) else (job.kept, job.folder)


def _num_sequences(job: SampleJob | TeacherJob) -> int:
    return sum(prompt.num_samples for prompt in job.prompts)


def _widths(job: SampleJob | TeacherJob) -> list[int]:
    """Number of tokens scored per position, by prompt."""
    named = [0 if prompt.scoring.ids is None else prompt.scoring.ids.shape[1] for prompt in job.prompts]
    return [max(p.num_top, p.scoring.num_top, width) for p, width in zip(job.prompts, named, strict=True)]


def _widest(job: SampleJob | TeacherJob) -> int:
    return max(_widths(job), default=0)


def _num_scored(job: SampleJob | TeacherJob) -> int:
    """Upper bound on the positions at which tokens are scored."""
    lengths = [len(p.tokens) + (p.num_samples * p.sampling.max_tokens if p.num_top else 0) for p in job.prompts]
    return sum(length for length, width in zip(lengths, _widths(job), strict=True) if width)


def _num_tokens(job: RunPass) -> int:
    return sum(map(len, job.data))


def _rows(job: RunPass) -> range:
    return range(job.shape.rows.start, job.shape.rows.stop)


def _runs_of(job: ServiceJob) -> tuple[str, ...]:
    match job:
        case Forget(runs):
            return runs
        case RunPass(run) | RunMethodCall(run):
            return (run,)
    return ()
