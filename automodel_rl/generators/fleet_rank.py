"""A rank of a fleet: its generator, and what each job does with it."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.errors import RolloutError, innermost
from automodel_rl.generators import jobs
from automodel_rl.generators.protocol import Completion, Generator
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.parallel.host_collectives import gather_objects
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
        self._open = contextlib.ExitStack()
        self.handlers: dict[type[Job], Callable[[Any, Share | None], Any]] = {
            jobs.StartGenerators: self._start,
            jobs.SyncWeights: self._sync_weights,
            jobs.Wake: lambda job, _: self.supervisor.wake(),
            jobs.Sleep: self._sleep,
            jobs.Restore: lambda job, _: self.supervisor.offload.restore(),
            jobs.Write: self._write,
            jobs.WriteAlike: self._write_alike,
            jobs.RestartGenerators: lambda job, _: self.supervisor.restart(bool(self.supervisor.problem)),
            jobs.CloseGenerators: lambda job, _: self.close(),
        }

    def close(self) -> None:
        """Ends this rank's generator, if it has one that was not ended."""
        self._open.close()

    def _start(self, job: jobs.StartGenerators, _: Share | None) -> None:
        self.supervisor = GeneratorSupervisor(job.spec, self.policy.engine, self.tokenizer, self.prepare)
        self._open.callback(self.supervisor.close)

    def _sync_weights(self, job: jobs.SyncWeights, _: Share | None) -> None:
        if job.is_new:
            self.supervisor.load_weights()
        else:
            self.supervisor.load_weights_again()

    def _sleep(self, job: jobs.Sleep, _: Share | None) -> str:
        self.supervisor.sleep()
        return self.supervisor.offload.warning

    def _write(self, job: jobs.Write, _: Share | None) -> dict[int, Completion]:
        supervisor = self.supervisor
        own = supervisor.ranks.deal(len(job.requests))[dist.get_rank()]
        written: list[Completion] = []
        if supervisor.generator is not None and not supervisor.problem:
            try:
                written = supervisor.generator.submit([job.requests[place] for place in own])() if own else []
            except Exception as error:
                supervisor.problem = innermost(error)
        problems = gather_objects(supervisor.problem, supervisor.world)
        failed = [(rank, text) for rank, text in enumerate(problems) if text]
        if failed:
            raise RolloutError(f"the generator of rank {failed[0][0]} cannot write: {failed[0][1]}")
        return {place: dataclasses.replace(one, routes=None) for place, one in zip(own, written, strict=True)}

    def _write_alike(self, job: jobs.WriteAlike, _: Share | None) -> tuple[int, list[Completion]] | None:
        supervisor = self.supervisor
        if not supervisor.ranks.leads or supervisor.generator is None or supervisor.problem:
            return None
        try:
            written = supervisor.generator.submit(job.requests)()
        except Exception as problem:  # the next rollout starts it again
            supervisor.problem = supervisor.problem or innermost(problem)
            return None
        return dist.get_rank(), [dataclasses.replace(completion, routes=None) for completion in written]
