"""Reinforcement learning with a critic (PPO): rollouts, values, advantages, optimizer steps of both, weight sync."""

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.batch import Batch, to_token
from automodel_rl.config.algorithms import PPOConfig
from automodel_rl.engine import TrainOutput
from automodel_rl.generators.fleet import Fleet
from automodel_rl.losses import Readout
from automodel_rl.losses.gae import gae, whitened
from automodel_rl.losses.terms import kl_estimate
from automodel_rl.losses.value import MOMENTS, OLD_VALUES, RETURNS, explained_variance, value_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.groups import Group
from automodel_rl.trainers.online import OnlineRun, policy_loss
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.rollout_batch import counted, epochs_of
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.step import Step

SCORES = Readout(scores=True)


def ppo(policy: Policy, fleet: Fleet, run: Run) -> Path:
    """Trains a policy on rewards, and a critic on returns, with a `PPOConfig`. Returns the folder of the trained
    checkpoint.

    Raises:
        RolloutError: generators failed; a checkpoint is saved.
    """
    config: PPOConfig = run.config
    loss, readout = choose_loss(config, policy_loss(config)), Readout(config.rollout.temperature, entropy=True)
    critic_loss = functools.partial(value_loss, clip=config.critic.value_clip)
    critic, warmup_steps = run.further["critic"], config.critic.warmup_steps
    online = OnlineRun(policy, fleet, run, idle_steps=warmup_steps)
    critic.begin(config.critic.optimizer, online.num_optimizer_steps, run.directory.not_finite)
    if config.critic.between == "host":
        critic.to_host()  # before generators take their memory
    online.begin()
    online.resume()
    for step in online.steps():
        groups, batch = online.collect(step)
        with policy.off_device() if critic.is_on_host else contextlib.nullcontext(), critic.on_device():
            with step.time("values"):
                add_advantages(batch, values_of(critic, batch), token_rewards(groups, batch, config), config)
            epochs = epochs_of(batch, groups, config, run.step)
            parts = [part for epoch in epochs for part in epoch.split()]
            with step.time("critic"):
                places = online.places(step, len(parts))
                of_critic = [
                    critic.train_step(part, critic_loss, SCORES, step_index=place)
                    for part, place in zip(parts, places, strict=True)
                ]
        online.write_details(step, groups, batch, torch.stack([one.mean() for one in batch["advantages"]]))
        outputs = [TrainOutput(0.0, 0.0, 0, 0.0, skipped=False)]
        if step.number > warmup_steps:
            with step.time("train"):
                replay, places = bool(batch.routes), online.places(step, len(parts), warmup_steps)
                outputs = [
                    policy.train_step(part, loss, readout, replay=replay, step_index=place)
                    for part, place in zip(parts, places, strict=True)
                ]
        record_critic(step, of_critic)
        online.end(step, outputs, epochs)
    return online.finish()


def values_of(critic: Policy, batch: Batch) -> list[Tensor]:
    """Values of the states in which each row's tokens were chosen, float64 [n]; 0 for the first token."""
    return [to_token(scores)[:, 0].double() for scores in critic.scores(batch)]


def token_rewards(groups: Sequence[Group], batch: Batch, config: PPOConfig) -> list[Tensor]:
    """Rewards of each row's tokens, float64 [n]: the completion's reward at the last token that the model wrote, and
    the KL penalty against the reference at every one, if configured.

    Args:
        batch: the groups' rows, with `old_logprobs` and `ref_logprobs` if the reward has a KL term.
    """
    of_episodes = torch.cat([group.rewards for group in groups])
    found = []
    for row, episode in zip(batch.sequences, batch.episodes, strict=True):
        rewards = torch.zeros(len(row), dtype=torch.float64)
        if config.has_kl_in_reward:
            old, reference = (row.values[name].double() for name in ("old_logprobs", "ref_logprobs"))
            divergence = kl_estimate(old, reference, config.loss.kl.estimator)
            rewards -= config.loss.kl.coefficient * torch.where(row.loss_mask, divergence, 0.0)
        places = counted(row).nonzero()[:, 0]
        if len(places):
            rewards[places[-1]] += of_episodes[episode]
        found.append(rewards)
    return found


def add_advantages(batch: Batch, values: Sequence[Tensor], rewards: Sequence[Tensor], config: PPOConfig) -> None:
    """Adds `advantages` to rows, and `returns` and `old_values` for the critic.

    Args:
        values: values of the states in which tokens were chosen, [n] per row.
        rewards: token rewards, [n] per row.
    """
    masks = [counted(row) for row in batch.sequences]
    of_rows = [gae(*row, config.gae) for row in zip(rewards, values, masks, strict=True)]
    advantages = [advantage for advantage, _ in of_rows]
    batch["advantages"] = whitened(advantages, masks) if config.gae.whiten else advantages
    batch[RETURNS], batch[OLD_VALUES] = [returns for _, returns in of_rows], values


def record_critic(step: Step, outputs: Sequence[TrainOutput]) -> None:
    """Adds the means of a critic's metrics over optimizer steps to those of a step."""
    of_steps = [
        {"critic/loss": one.loss, "critic/grad_norm": one.grad_norm, "critic/lr": one.lr, **one.metrics}
        for one in outputs
    ]
    means = {}
    for name in dict.fromkeys(name for one in of_steps for name in one):  # a step without trained tokens has fewer
        values = [one[name] for one in of_steps if name in one]
        means[name] = sum(values) / len(values)
    if all(name in means for name in MOMENTS):
        step.metrics["critic/explained_variance"] = explained_variance(means)
    step.metrics |= {name: value for name, value in means.items() if name not in MOMENTS}
