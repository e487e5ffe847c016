"""A step's rollouts: collected, filtered, counted and written. A run whose rewards never differ ends."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import OnlineConfig
from automodel_rl.data.prompts import PromptStream
from automodel_rl.errors import InputError, RolloutError, StoppedError
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.weight_probe import WeightProbe
from automodel_rl.rollout.agents.metrics import why_forked
from automodel_rl.rollout.groups import (
    Group,
    all_scores,
    conversations_of,
    first_error,
    rollout_metrics,
    rollout_records,
    shaped_rewards,
)
from automodel_rl.rollout.protocol import Promptlike
from automodel_rl.trainers.rollout_batch import Details, batch_of, missing_routes
from automodel_rl.trainers.rollout_queue import RolloutQueue
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.step import Step
from automodel_rl.trainers.validation import Validation

MAX_STEPS = 10
"""Consecutive steps without signal after which a run ends."""


class RewardWatch:
    """Counter of consecutive steps in which no group has differing rewards.

    Args:
        rollouts: folder with the run's completions, for the message.

    Attributes:
        num_steps: number of such steps so far.
    """

    def __init__(self, rollouts: Path):
        self.rollouts = rollouts
        self.num_steps = 0

    def look_at(self, groups: Sequence[Group]) -> None:
        """Counts a step. Raises RolloutError after too many without signal."""
        self.num_steps = 0 if any(group.has_signal for group in groups) else self.num_steps + 1
        if self.num_steps >= MAX_STEPS:
            raise RolloutError(
                f"in {MAX_STEPS} consecutive steps no prompt had completions with different rewards, so there is "
                f"nothing to learn: inspect {self.rollouts}, use easier or harder prompts, or raise rollout.group_size"
            )

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


class StepRollouts:
    """Collects each step's rollouts, and warns of problems.

    Args:
        queue: draws prompts and submits them to the generators.
        probe: compares generators with the model.
        validation: its prompts should not be trained on.

    Attributes:
        signal: ends a run without differing rewards.
    """

    def __init__(
        self,
        config: OnlineConfig,
        run: Run,
        fleet: Fleet,
        queue: RolloutQueue,
        probe: WeightProbe,
        validation: Validation,
    ):
        self.config, self.run, self.fleet, self.queue, self.probe = config, run, fleet, queue, probe
        self.signal = RewardWatch(run.directory.rollouts)
        self.validation = validation
        self._held_out = {_problem_of(prompt) for prompt in validation.prompts}
        self._generated: list[Group] = []
        self._mentioned: set[str] = set()

    @property
    def prompts(self) -> PromptStream:
        return self.queue.prompts

    def collect(self, step: Step) -> tuple[list[Group], Batch]:
        """Returns the groups to learn from in a step, and their rollouts as rows. Records metrics.

        Raises:
            RolloutError: generators failed, or rewards never differed. A checkpoint of the previous step is saved.
            InputError: the same for a reward that always fails.
        """
        before = self.run.state()
        try:
            with self.fleet.awake(step.time), step.time("rollout"):
                if self._is_probed:
                    self.probe.ask()
                groups = self._generate()
            if self._is_probed:
                self.fleet.restore()
                self.probe.judge()
            if self.config.compares_completions:
                self.signal.look_at(groups)
            step.metrics |= rollout_metrics(self._generated, self.config.reward_names, self.fleet.policy_version)
            for warning in self.queue.rollouts.errors.warnings(all_scores(self._generated), f"step {step.number}"):
                self.run.say(warning)
            with step.time("pack"):
                batch = batch_of(groups, self.config)
                self.run.policy.size(batch)  # raises if rows do not fit
                if batch.routes and self.run.handle.router_shape is not None:
                    shape = self.run.handle.router_shape
                    step.metrics["rollout/routes_missing"] = missing_routes(groups, batch, shape)
        except (RolloutError, InputError, StoppedError):
            self.fleet.restore()
            self.run.abandon_step(before)
            raise
        if self.fleet.postponed:
            step.metrics["rollout/lost_generators"] = len(self.fleet.postponed)
        step.metrics["data/num_overlong_prompts"] = self.prompts.num_overlong
        step.metrics["data/num_bad_records"] = self.prompts.num_refused
        self._mention_overlong()
        self._mention_refused()
        self._mention_held_out()
        self.write({})  # now, so that they exist even if the step fails
        return groups, batch

    def write(self, details: Details) -> None:
        """Writes all rollouts of the step, with their origin and the details of some."""
        told = {
            rollout.key: {**self._origin(rollout.completion), **details.get(rollout.key, {})}
            for group in self._generated
            for rollout in group.rollouts
        }
        records = rollout_records(self._generated, self.config.reward_names, self.run.tokenizer, told)
        self.run.write_step_file("rollouts", self.run.directory.rollouts, records)

    def _origin(self, completion: Completion) -> dict[str, Any]:
        """The generator of a single-turn completion, and the age of its oldest token in policy versions."""
        versions, writer = completion.versions, completion.writer
        age = {} if versions is None else {"staleness": self.fleet.policy_version - versions[0]}
        return age if writer is None else {"generator": self.fleet.name_of(writer), **age}

    @property
    def _is_probed(self) -> bool:
        """Whether this step compares the generators' computation with the model's."""
        every = self.config.weight_sync.check_every
        return bool(every) and self.run.step % every == 0

    def _generate(self) -> list[Group]:
        """Generates groups, and returns those to learn from."""
        rollout, filter = self.config.rollout, self.config.filter
        generated: list[Group] = []
        chosen: list[Group] = []
        if self.config.router_replay.enabled:
            self.run.policy.forget_routes(self.queue.rollouts.numbers_taken())
        taken = self.queue.next(self.run.steps_left)
        for refills in itertools.count():
            prompts, rollouts = taken
            new = [
                Group(
                    prompt,
                    group,
                    shaped_rewards(group, filter, rollout.max_new_tokens),
                    excludes_truncated=filter.mask_overlong and not filter.masked_count,
                    weights=self.config.weights_alone,
                )
                for prompt, group in zip(prompts, rollouts, strict=True)
            ]
            generated += new
            fewest = 2 if self.config.compares_completions else 1
            comparable = [one for one in (group.compared for group in new) if len(one.rollouts) >= fewest]
            chosen += [group for group in comparable if group.has_signal or not filter.dynamic]
            if len(chosen) == rollout.prompts or not filter.dynamic or refills == filter.max_refills:
                break
            taken = self.queue.more(rollout.prompts - len(chosen))
        if not chosen:  # without the length penalty these teach nothing, but the step still takes place
            chosen = [group.compared.unshaped for group in generated if group.is_comparable]
        if not chosen and filter.mask_overlong:  # too many were truncated: a step with zero rewards teaches nothing
            scored = [group.scored for group in generated if len(group.scored.rollouts) >= fewest]
            chosen = [dataclasses.replace(group, rewards=torch.zeros_like(group.rewards)) for group in scored]
        if not chosen:
            error = first_error(rollout for group in generated for rollout in group.rollouts)
            needed = "two completions" if fewest == 2 else "a completion"
            raise RolloutError(f"no group has {needed} with rewards: others failed or got none; first error: {error}")
        self._generated = generated
        return chosen

    def _mention_overlong(self) -> None:
        training, held_out = self.prompts.num_overlong, self.validation.num_overlong
        if training + held_out:
            self._say_once(
                "overlong",
                f"warning: {training} of the first {self.prompts.num_drawn} prompts and {held_out} held-out ones are "
                f"longer than rollout.max_prompt_tokens={self.config.rollout.max_prompt_tokens} and were dropped; "
                "data/num_overlong_prompts counts them",
            )

    def _mention_refused(self) -> None:
        if refused := self.prompts.refused or self.validation.refused:
            self._say_once(
                "refused",
                f"warning: {refused}: skipped; so far {self.prompts.num_refused} of the first {self.prompts.num_drawn} "
                f"prompts and {self.validation.num_refused} held-out ones; data/num_bad_records counts them",
            )

    def _mention_held_out(self) -> None:
        prompts = [group.prompt for group in self._generated if not group.prompt.media]  # images share the same tokens
        count = sum(_problem_of(prompt) in self._held_out for prompt in prompts)
        if count:
            self._say_once(
                "held out",
                f"warning: {count} of the step's {len(self._generated)} prompts are also held-out prompts, so val/ "
                "measures what was trained: keep data.validation apart from data.train",
            )

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._mentioned:
            self._mentioned.add(what)
            self.run.say(text)

    def warn(self, step: Step) -> None:
        if self.fleet.warning:
            self._say_once("memory", self.fleet.warning)
        for rank, problem in self.fleet.postponed.items():
            self._say_once(
                f"lost {rank}",
                f"warning: the generator of rank {rank} does not recover ({problem}): others generate its share, and "
                "it is restarted some steps later; rollout/lost_generators counts lost ones",
            )
        for what, note in self.queue.rollouts.notes.items():
            self._say_once(f"agents {what}", note)
        agents = [one for one in conversations_of(self._generated) if one.is_agent_episode]
        if forked := why_forked(agents):
            self._say_once("forks", forked)
        if self.signal.num_steps == 1:
            but = " but length" if self.config.filter.overlong_buffer and not self.config.filter.dynamic else ""
            self.run.say(f"warning: no group of step {step.number} has differing rewards; it taught nothing{but}")
        if step.metrics["rollout/failed"]:
            self.run.say(
                f"warning: {step.metrics['rollout/failed']} completions of step {step.number} failed and were removed "
                "from their groups; see rollouts/ for the errors"
            )
        if count := step.metrics["rollout/invalid_logprobs"]:
            self._say_once(
                "invalid",
                f"warning: the generator returned no valid log-probability (nan, infinite or above 0) for {count} "
                f"tokens of step {step.number}, which are excluded from the loss; rollout/invalid_logprobs counts them "
                "in every step",
            )
        error, most = step.metrics.get("train/logprob_error"), self.config.rollout.warn_logprob_error
        is_stale = self.config.rollout.max_staleness > 0  # older weights, so disagreement is expected
        if error is not None and error > most and not is_stale:
            self.run.say(
                f"warning: train/logprob_error is {error:.3f} in step {step.number}, above "
                f"rollout.warn_logprob_error={most}: the generator and the model that learns from its completions "
                "disagree"
            )


def _problem_of(prompt: Promptlike) -> int:
    """Hashes a problem so that the same one from two files is equal: by prompt and answer, or the whole record
    without an answer."""
    return hash(repr((prompt.token_ids, prompt.example.get("answer", prompt.example))))
