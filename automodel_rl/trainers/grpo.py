"""Reinforcement learning on prompts with rewards (GRPO): rollouts, advantages, optimizer steps, weight sync."""

import functools
import operator
from pathlib import Path

from torch import Tensor

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.data.prompts import PromptStream
from automodel_rl.errors import InputError
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.weight_probe import WeightProbe
from automodel_rl.losses import LossFn, Readout, grpo_loss
from automodel_rl.losses.disagreement import effective_sample_size
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.rollout_batch import advantages_of, details_of, epochs_of
from automodel_rl.trainers.rollout_queue import RolloutQueue
from automodel_rl.trainers.run import REFERENCE, Goal, Run
from automodel_rl.trainers.step_rollouts import StepRollouts
from automodel_rl.trainers.validation import Validation


def grpo(policy: Policy, fleet: Fleet, run: Run) -> Path:
    """Trains a policy on rewards. The config is a `GRPOConfig`.

    Args:
        policy: the model in training.
        fleet: its generators.
        run: the frame around the steps.

    Returns:
        The folder of the trained checkpoint.

    Raises:
        RolloutError: generators failed, or completions' rewards never differed; a checkpoint is saved.
    """
    config: GRPOConfig = run.config
    loss, readout = choose_loss(config, own_loss(config)), Readout(config.rollout.temperature, entropy=True)
    rollouts = run.rollouts(fleet, config.rewards)
    prompts = run.prompts(rollouts.schemas)
    prompts.check_fit()
    validation = Validation(config, run, rollouts)
    total_steps = config.length.steps or _steps_of_epochs(config, prompts)
    policy.begin(config.optimizer, total_steps * config.batch.steps_of_all_epochs, run.directory.not_finite)
    if config.needs_reference:  # the model's first weights, before a checkpoint replaces them
        policy.keep_weights(REFERENCE, lends_memory=config.shares_memory)
    fleet.start(rollouts.config.generator_spec)
    probe = WeightProbe(config, policy, fleet, run.handle, run.tokenizer)
    queue = RolloutQueue(prompts, rollouts)
    collected = StepRollouts(config, run, fleet, queue, probe, validation.num_overlong)
    run.resume(Goal(total_steps, "val/reward_mean", True), {"prompts": queue, "signal": collected.signal})
    if rollouts.warning:
        run.say(rollouts.warning)
    if not run.is_finished:
        if config.weight_sync.check_every:
            probe.check_changed_weights()
        fleet.sync()

    for step in run.steps(_summary(config, prompts), validation.baseline):
        groups, batch = collected.collect(step)
        with step.time("logprobs"):
            add_logprobs(policy, fleet, batch, config)
        with step.time("advantages"):
            batch["advantages"] = advantages = advantages_of(groups, batch, config)
        with step.time("details"):
            collected.write(details_of(groups, advantages, looked_at(policy, run, batch), run.tokenizer))
        with step.time("train"):
            epochs = epochs_of(batch, groups, config, run.step)
            parts = [part for epoch in epochs for part in epoch.split()]
            outputs = [policy.train_step(part, loss, readout, replay=bool(batch.routes)) for part in parts]
        with step.time("sync"):
            fleet.sync()
        step.record(outputs, functools.reduce(operator.add, map(policy.size, epochs)))
        step.metrics |= effective_sample_size(step.metrics)
        collected.warn(step)
        validation.measure_in(step)
    fleet.close()
    return run.finish()


def own_loss(config: GRPOConfig) -> LossFn:
    """The loss of a config that names no other."""
    longest = config.loss.max_completion_tokens or config.rollout.sampled_tokens
    decided = {"max_completion_tokens": longest, "on_policy": config.is_on_policy}
    return functools.partial(grpo_loss, config=config.loss.model_copy(update=decided))


def add_logprobs(policy: Policy, fleet: Fleet, batch: Batch, config: GRPOConfig) -> None:
    """Gives rows the log-probabilities that the loss and the metrics need: under the policy before this step, and under
    the reference.

    The reference comes first: after a rollout, the policy's weights may still be on the host.
    """
    temperature, stages = config.rollout.temperature, config.router_replay.stages if batch.routes else ()
    if config.needs_reference:
        with policy.with_weights(REFERENCE):
            batch["ref_logprobs"] = policy.logprobs(batch, temperature, replay="ref_logprobs" in stages)
    fleet.restore()
    if not config.is_on_policy:
        batch["old_logprobs"] = policy.logprobs(batch, temperature, replay="old_logprobs" in stages)
    if config.router_replay.compare:
        batch["live_logprobs"] = policy.logprobs(batch, temperature)


def looked_at(policy: Policy, run: Run, batch: Batch) -> dict[int, Tensor]:
    """Log-probabilities of a few rows for the report, by the rows' numbers; if they are not there yet, only in steps
    that are looked at most."""
    rows = policy.first_rows(batch)
    if "old_logprobs" in batch:
        logprobs = batch["old_logprobs"]
        return {row: logprobs[row] for row in rows}
    is_looked_at = run.step == 1 or run.is_due(run.config.checkpoint.every_steps) or run.is_over
    if not (is_looked_at and run.config.observe.samples):
        return {}
    return dict(zip(rows, policy.logprobs(batch.rows(rows), run.config.rollout.temperature), strict=True))


def _summary(config: GRPOConfig, prompts: PromptStream) -> str:
    rollout, num_prompts = config.rollout, sum(prompts.sampler.sizes)
    return f"{rollout.prompts} prompts x {rollout.group_size} completions a step, of {num_prompts:,} prompts"


def _steps_of_epochs(config: GRPOConfig, prompts: PromptStream) -> int:
    epochs = config.length.epochs or 0.0
    steps = round(epochs * sum(prompts.sampler.sizes)) // config.rollout.prompts
    if steps == 0:
        raise InputError(f"length.epochs={epochs} is less than one step of {config.rollout.prompts} prompts: raise it")
    return steps
