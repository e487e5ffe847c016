"""A rank of a fleet: its generator, and what each job does with it."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.engine.warm_up import warm_up
from automodel_rl.generators import jobs
from automodel_rl.generators.make_generator import welcome_of
from automodel_rl.generators.protocol import Generator
from automodel_rl.generators.relay import Relay
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.policy.jobs import Job
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.policy.shares import Share
from automodel_rl.weight_sync.transport import Transport


class FleetRank:
    """Does a fleet's jobs on this rank.

    Args:
        policy: this rank of the policy, whose weights the generator gets.
        tokenizer: the model's tokenizer.
        prepare: called with every generator that is started and its transport, before it gets weights.

    Attributes:
        supervisor: the supervisor of this rank's generator; there from the job `StartGenerators` on.
    """

    def __init__(
        self,
        policy: PolicyRank,
        tokenizer: PreTrainedTokenizerBase,
        prepare: Callable[[Generator, Transport], None] = lambda generator, transport: None,
    ):
        self.policy, self.tokenizer, self.prepare = policy, tokenizer, prepare
        self.supervisor: GeneratorSupervisor
        self._relay: Relay
        self._open = contextlib.ExitStack()
        self.handlers: dict[type[Job], Callable[[Any, Share | None], Any]] = {
            jobs.StartGenerators: self._start,
            jobs.WelcomeGenerators: lambda job, _: welcome_of(job.spec, self.policy.handle, self.tokenizer),
            jobs.PublishedVersion: lambda job, _: self.supervisor.published,
            jobs.SyncWeights: self._sync_weights,
            jobs.Wake: self._wake,
            jobs.Sleep: self._sleep,
            jobs.Restore: lambda job, _: self.supervisor.offload.restore(),
            jobs.Write: self._write,
            jobs.RestartGenerators: self._restart,
            jobs.CloseGenerators: lambda job, _: self.close(),
        }

    def close(self) -> None:
        """Ends this rank's generator, if one is running."""
        self._open.close()

    def _start(self, job: jobs.StartGenerators, _: Share | None) -> tuple[int, bool] | None:
        self.supervisor = GeneratorSupervisor(
            job.spec, self.policy.engine, self.tokenizer, self.prepare, functools.partial(self._warm_up, job.spec)
        )
        self._open.callback(self.supervisor.close)
        if not self.supervisor.ranks.leads:
            return None
        rank = dist.get_rank()
        self._relay = Relay(rank, self.supervisor, self.policy.routes, job.address)
        self._open.callback(self._relay.close)
        assert self.supervisor.generator is not None
        return rank, self.supervisor.generator.works_alone

    def _warm_up(self, spec: GeneratorSpec) -> None:
        """Compiles while generators start, unless they are to have the trainer's memory now."""
        if not (spec.sleep_level or spec.shares_memory):
            warm_up(self.policy.engine, spec.longest_sequence)

    @property
    def _problem(self) -> tuple[int, str] | None:
        return (dist.get_rank(), self.supervisor.problem) if self.supervisor.problem else None

    def _sync_weights(self, job: jobs.SyncWeights, _: Share | None) -> tuple[int, str] | None:
        self.supervisor.load_weights(job.policy_version, job.needed)
        return self._problem

    def _wake(self, job: jobs.Wake, _: Share | None) -> tuple[int, str] | None:
        self.supervisor.wake()
        return self._problem

    def _sleep(self, job: jobs.Sleep, _: Share | None) -> str:
        self.supervisor.sleep()
        return self.supervisor.offload.warning

    def _write(self, job: jobs.Write, _: Share | None) -> None:
        if requests := job.requests.get(dist.get_rank()):
            self._relay.write(requests)

    def _restart(self, job: jobs.RestartGenerators, _: Share | None) -> tuple[int, str] | None:
        supervisor, rank = self.supervisor, dist.get_rank()
        supervisor.lose(supervisor.generator, job.lost.get(rank, ""))
        supervisor.restart(bool(supervisor.problem) and rank not in job.given_up)
        return self._problem
