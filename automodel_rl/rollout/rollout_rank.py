"""A rank of rollouts: it lets its generator write, and scores what it has written."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automodel_rl.config import RolloutRunConfig
from automodel_rl.data.template import ChatTemplate
from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.policy.jobs import Job
from automodel_rl.policy.shares import Share
from automodel_rl.rollout import jobs
from automodel_rl.rollout.collect import Pending, RolloutCollector
from automodel_rl.rollout.episodes.conversations import Conversations
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.scorer import Scorer


class RolloutRank:
    """Does the jobs of rollouts on this rank.

    Args:
        config: the run's config.
        fleet: this rank of the fleet, whose generator writes.
        template: the chat template, for completions of several turns.
        logs: folder for the log of what environments print.
    """

    def __init__(self, config: RolloutRunConfig, fleet: FleetRank, template: ChatTemplate, logs: Path):
        self.config, self.fleet, self.template, self.logs = config, fleet, template, logs
        self.conversations: Conversations | None = None
        self.scorer: Scorer
        self._pending: dict[int, Pending] = {}
        self._open = contextlib.ExitStack()
        self.handlers: dict[type[Job], Callable[[Any, Share | None], Any]] = {
            jobs.OpenConversations: self._open_conversations,
            jobs.OpenRollouts: self._open_rollouts,
            jobs.BeginRollouts: self._begin,
            jobs.TakeRollouts: self._take,
            jobs.CloseRollouts: lambda job, _: self.close(),
        }

    def close(self) -> None:
        """Ends the processes of rewards and environments that were not ended."""
        self._open.close()

    def _open_conversations(self, job: jobs.OpenConversations, _: Share | None) -> jobs.ConversationFacts:
        self.conversations = Conversations(self.config, self.template, self.logs)
        self._open.callback(self.conversations.close)
        return self.conversations.facts

    def _open_rollouts(self, job: jobs.OpenRollouts, _: Share | None) -> None:
        self.scorer = Scorer(job.rewards)
        self._open.callback(self.scorer.close)

    @functools.cached_property
    def collector(self) -> RolloutCollector:
        """Asks this rank's generator, which has been started."""
        supervisor, tokenizer = self.fleet.supervisor, self.fleet.tokenizer
        return RolloutCollector(self.config, supervisor, tokenizer, self.scorer, self.conversations)

    def _begin(self, job: jobs.BeginRollouts, _: Share | None) -> None:
        self._pending[job.number] = self.collector.submit(job.prompts, job.group_size, job.sampling)

    def _take(self, job: jobs.TakeRollouts, _: Share | None) -> dict[int, Rollout]:
        written = self.collector.take(self._pending.pop(job.number), job.number)
        if job.keeps_routes:
            self.fleet.policy.routes.own |= written.routes
        return written.rollouts
