"""A rank of the service: what it does for each job."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.jobs import Job, OfFurtherModel
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.policy.shares import Share
from automodel_rl.serve import jobs, messages
from automodel_rl.serve.adapter_scale import AdapterScale
from automodel_rl.serve.runs import Runs


class ServiceRank:
    """Does the service's jobs on this rank, with the others.

    Args:
        handle: the model.
        tokenizer: its tokenizer.
        teachers: further base models by name.

    Attributes:
        teachers: those of the arguments.
        runs: the runs; there from the job `OpenRuns` on.
    """

    def __init__(
        self,
        handle: ModelHandle,
        tokenizer: PreTrainedTokenizerBase,
        teachers: Mapping[str, ModelHandle] = MappingProxyType({}),
    ):
        self.policy, self.teachers = PolicyRank(handle, tokenizer), teachers
        self._of_teachers = {name: PolicyRank(teacher, tokenizer) for name, teacher in teachers.items()}
        self._scale = AdapterScale()
        fleet = FleetRank(self.policy, tokenizer, self._scale.prepare)
        self.runs: Runs
        own: dict[type[Job], Callable[[Any, Share | None], Any]] = {
            jobs.OpenRuns: self._open_runs,
            jobs.OfRuns: lambda job, _: self._of_runs(job.asked),
            jobs.Pass: lambda job, share: self.runs.run_pass(job, share),
            jobs.Show: self._show,
            OfFurtherModel: lambda job, share: self._of_teachers[job.name].do(job.job, share),
        }
        self.handlers = self.policy.handlers | fleet.handlers | own

    def do(self, job: Job, share: Share | None) -> Any:
        """Does a job, with the rows of this rank's data rank."""
        return self.handlers[type(job)](job, share)

    def _open_runs(self, job: jobs.OpenRuns, _: Share | None) -> None:
        self.runs = Runs(self.policy.engine)

    def _show(self, job: jobs.Show, _: Share | None) -> None:
        self.runs.show(job.kept, job.folder, job.shape)
        self._scale.set(self.runs.trained.scale)

    def _of_runs(self, asked: messages.ServiceJob) -> Any:
        match asked:
            case messages.CreateRun(run, shape):
                return self.runs.create(run, shape)
            case messages.Spoil(run):
                return self.runs.spoil(run)
            case messages.RunOptimizerStep(run, settings):
                return self.runs.optimizer_step(run, settings)
            case messages.Save(run, folder, for_training, about):
                return self.runs.save(run, Path(folder), for_training, about)
            case messages.Load(run, shape, folder, with_optimizer):
                return self.runs.load(run, shape, Path(folder), with_optimizer)
            case messages.Keep(run, name):
                return self.runs.keep(run, name)
            case messages.Forget(runs, kept):
                return self.runs.forget(runs, kept)
        raise AssertionError(f"runs have no job {type(asked).__name__}")
