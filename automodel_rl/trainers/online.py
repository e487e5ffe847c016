"""Code shared by reinforcement learning programs: generators, prompts, rollouts and validation."""

import functools
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import OnlineConfig
from automodel_rl.data.prompts import PromptStream
from automodel_rl.engine import TrainOutput
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.weight_probe import WeightProbe
from automodel_rl.losses import LossFn, grpo_loss
from automodel_rl.losses.policy_gradient import UNCERTAIN, uncertain_tokens
from automodel_rl.losses.rollout_mismatch import effective_sample_size
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.groups import Group
from automodel_rl.trainers.rollout_batch import counted, details_of
from automodel_rl.trainers.rollout_queue import RolloutQueue
from automodel_rl.trainers.run import REFERENCE, Goal, Resumable, Run
from automodel_rl.trainers.step import Step
from automodel_rl.trainers.step_rollouts import StepRollouts
from automodel_rl.trainers.validation import Validation


class OnlineRun:
    """A run that learns from its own completions. The program trains in each step; this class does the rest.

    Call order: construct it, call `begin`, set up whatever needs the initial weights of further models, and call
    `resume`. In each step, call `collect`, train, and call `end`. Finally, call `finish`.

    Args:
        run: its config is an `OnlineConfig`.
        idle_steps: initial steps in which the policy is not trained.

    Attributes:
        num_optimizer_steps: optimizer steps of the run, including idle ones.

    Raises:
        InputError: rewards or prompts are invalid, or the run is too short.
    """

    def __init__(self, policy: Policy, fleet: Fleet, run: Run, idle_steps: int = 0):
        self.policy, self.fleet, self.run = policy, fleet, run
        self.config: OnlineConfig = run.config
        self.rollouts = run.rollouts(fleet, self.config.rewards)
        self.prompts = run.prompts(self.rollouts.schemas)
        self.prompts.check_fit()
        self.validation = Validation(self.config, run, self.rollouts)
        self.total_steps = self.config.length.steps or _steps_of_epochs(self.config, self.prompts)
        self.num_optimizer_steps = self.total_steps * self.config.batch.steps_of_all_epochs
        if idle_steps and idle_steps >= self.total_steps:
            raise InputError(
                f"critic.warmup_steps={idle_steps} in a run of {self.total_steps} steps: the policy would never be "
                "trained: lower it"
            )
        self._idle = idle_steps * self.config.batch.steps_of_all_epochs
        self._collected: StepRollouts
        self._probe: WeightProbe

    def begin(self) -> None:
        """Creates the optimizer, keeps the reference weights, and starts the generators."""
        config, policy = self.config, self.policy
        policy.begin(config.optimizer, max(self.num_optimizer_steps - self._idle, 1), self.run.directory.not_finite)
        if config.needs_reference:  # the model's initial weights, before a checkpoint replaces them
            policy.keep_weights(REFERENCE, lends_memory=config.shares_memory)
        self.fleet.start(self.rollouts.config.generator_spec)

    def resume(self) -> None:
        """Loads the requested checkpoint, if any, and syncs the generators' weights."""
        config, run = self.config, self.run
        self._probe = WeightProbe(config, self.policy, self.fleet, run.handle, run.tokenizer, run.say)
        queue = RolloutQueue(self.prompts, self.rollouts)
        self._collected = StepRollouts(config, run, self.fleet, queue, self._probe, self.validation)
        parts: dict[str, Resumable] = {
            "prompts": queue,
            "signal": self._collected.signal,
            "validation": self.validation,
        }
        run.resume(Goal(self.total_steps, "val/reward_mean", True), parts)
        if self.rollouts.warning:
            run.say(self.rollouts.warning)
        if not run.is_finished:
            if config.weight_sync.check_every:
                self._probe.check_changed_weights()
            self.fleet.sync()
            self.validation.go_on()

    def steps(self) -> Iterator[Step]:
        rollout, num_prompts = self.config.rollout, sum(self.prompts.sampler.sizes)
        summary = f"{rollout.prompts} prompts x {rollout.group_size} completions a step, of {num_prompts:,} prompts"
        return self.run.steps(summary, self.validation.baseline)

    def collect(self, step: Step) -> tuple[list[Group], Batch]:
        """Returns the groups to learn from in a step, and their rollouts as rows with the log-probabilities that
        losses need.

        Raises:
            RolloutError, InputError: as `StepRollouts.collect`.
        """
        groups, batch = self._collected.collect(step)
        with step.time("logprobs"):
            self._add_logprobs(batch)
        return groups, batch

    def write_details(self, step: Step, groups: Sequence[Group], batch: Batch, advantages: Tensor) -> None:
        """Writes details of the step's rollouts for the report. `advantages` has one value per row, [N]: its
        advantage, or the mean over its tokens."""
        with step.time("details"):
            self._collected.write(details_of(groups, advantages, self._looked_at(batch), self.run.tokenizer))

    def end(self, step: Step, outputs: list[TrainOutput], epochs: Sequence[Batch]) -> None:
        """Syncs the generators' weights, records metrics, warns and validates.

        Args:
            outputs: one per optimizer step of the policy.
            epochs: one batch per pass over the rollouts.
        """
        size = functools.reduce(operator.add, map(self.policy.size, epochs))
        try:
            with step.time("sync"):
                self.fleet.sync()
        except RolloutError:  # no generator can get the new weights, but the step was trained
            step.record(outputs, size)
            self.run.end_with(step)
            raise
        step.record(outputs, size)
        step.metrics |= effective_sample_size(step.metrics)
        self._collected.warn(step)
        self.validation.measure_in(step)

    def places(self, step: Step, count: int, idle_steps: int = 0) -> list[float]:
        """Returns the positions of a step's `count` optimizer steps in the run's learning-rate schedule. If the step
        has fewer optimizer steps than planned, they are spread over its whole range. `idle_steps` precede the first
        trained step."""
        planned = self.config.batch.steps_of_all_epochs
        return [(step.number - 1 - idle_steps) * planned + number * planned / count for number in range(count)]

    def finish(self) -> Path:
        """Closes the generators and the run. Returns the folder of the trained checkpoint."""
        self.fleet.close()
        return self.run.finish()

    def _add_logprobs(self, batch: Batch) -> None:
        """Adds the log-probabilities that the loss and the metrics need: under the policy before this step, and the
        reference.

        The reference comes first: after a rollout, the policy's weights may still be on the host.
        """
        config, policy = self.config, self.policy
        temperature, stages = config.rollout.temperature, config.router_replay.stages if batch.routes else ()
        if config.needs_reference:
            with policy.with_weights(REFERENCE):
                batch["ref_logprobs"] = policy.logprobs(batch, temperature, replay="ref_logprobs" in stages)
        self.fleet.restore()
        if not config.is_on_policy:
            batch["old_logprobs"] = policy.logprobs(batch, temperature, replay="old_logprobs" in stages)
        if config.loss.uncertain < 1:
            replays = "old_logprobs" in stages
            masks = [counted(row) for row in batch.sequences]
            entropies = policy.entropies(batch, temperature, replay=replays)
            batch[UNCERTAIN] = uncertain_tokens(entropies, masks, config.loss.uncertain)
        if config.router_replay.compare:
            batch["live_logprobs"] = policy.logprobs(batch, temperature)

    def _looked_at(self, batch: Batch) -> dict[int, Tensor]:
        """Returns log-probabilities of a few rows for the report, by row. If they are not known yet, computes them
        only in the steps most likely to be viewed."""
        policy, run = self.policy, self.run
        rows = policy.first_rows(batch)
        if "old_logprobs" in batch:
            logprobs = batch["old_logprobs"]
            return {row: logprobs[row] for row in rows}
        is_looked_at = run.step == 1 or run.is_due(run.config.checkpoint.every_steps) or run.is_over
        if not (is_looked_at and run.config.observe.samples):
            return {}
        return dict(zip(rows, policy.logprobs(batch.rows(rows), run.config.rollout.temperature), strict=True))


def policy_loss(config: OnlineConfig) -> LossFn:
    longest = config.loss.max_completion_tokens or config.rollout.sampled_tokens
    decided = {"max_completion_tokens": longest, "on_policy": config.is_on_policy}
    return functools.partial(grpo_loss, config=config.loss.model_copy(update=decided))


def _steps_of_epochs(config: OnlineConfig, prompts: PromptStream) -> int:
    epochs = config.length.epochs or 0.0
    steps = round(epochs * sum(prompts.sampler.sizes)) // config.rollout.prompts
    if steps == 0:
        raise InputError(f"length.epochs={epochs} is less than one step of {config.rollout.prompts} prompts: raise it")
    return steps
