"""Forward-backward passes of runs, driven by rank 0."""

from automodel_rl.errors import InputError
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.sampled import Refused
from automodel_rl.serve.joint_batch import JointBatch
from automodel_rl.serve.messages import LossResult, RunPass
from automodel_rl.serve.runs import GONE, RUNS, Pass, PassResult, Runs


class Passes:
    """Drives passes of one or several runs.

    Args:
        runs: the runs on this rank, to look up which exist.
    """

    def __init__(self, policy: Policy, runs: Runs):
        self.policy, self.crew, self.runs = policy, policy.crew, runs

    def forward_backward(self, job: RunPass) -> LossResult:
        """Accumulates the gradients of a loss, or only computes the loss.

        Raises:
            InputError: the data do not fit the model, or the run is gone. Gradients of earlier calls are kept, but
                the run's next optimizer step fails.
        """
        found = self._pass([job])
        assert found is not None
        return found[0]

    def combined_pass(self, asked: list[RunPass]) -> list[LossResult | Refused]:
        """Runs `forward_backward` for several runs without a common adapter row, in one pass.

        Raises:
            InputError: as for `forward_backward`, for all runs.
        """
        there = [job for job in asked if job.run in self.runs.shapes]
        results: list[LossResult] | list[LossResult | Refused] | None = self._pass(there) if there else []
        if results is None:
            results = [self._alone(job) for job in there]
        answers = iter(results)
        return [next(answers) if job in there else Refused(GONE) for job in asked]

    def _alone(self, job: RunPass) -> LossResult | Refused:
        try:
            return self.forward_backward(job)
        except InputError as error:
            return Refused(str(error))

    def _pass(self, asked: list[RunPass]) -> list[LossResult] | None:
        """Returns the results of jobs in one pass; None if an overflow in one run may have corrupted others."""
        batch = JointBatch(asked)
        try:
            global_batch, shares = self.policy.shares(batch.rows)
            runs = tuple(job.run for job in asked)
            of_pass = Pass(runs, batch.run_of, batch.loss, batch.readout, asked[0].forward_only, global_batch)
            answers: list[PassResult] = self.crew.gather(RUNS, "run_pass", of_pass, shares=shares)
        except InputError:
            for job in asked:
                if not job.forward_only:
                    self.crew.ask(RUNS, "mark_failed", job.run)
            raise
        if not answers[0].is_finite:
            return None
        found = {row: of for one in answers if one.logprobs is not None for row, of in one.logprobs.by_row().items()}
        return batch.results(answers[0].loss, found)
