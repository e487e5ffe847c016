"""Reinforcement learning on prompts with rewards (GRPO) or teachers: rollouts, advantages, optimizer steps, weight
sync."""

import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.generators.fleet import Fleet
from automodel_rl.losses import Readout
from automodel_rl.losses.distill import IDS, teacher_advantages, with_divergence
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.online import OnlineRun, policy_loss
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.rollout_batch import advantages_of, epochs_of, sources_of
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.teachers import Teachers


def grpo(policy: Policy, fleet: Fleet, run: Run) -> Path:
    """Trains a policy on rewards or on teachers' judgements, with a `GRPOConfig`. Returns the folder of the trained
    checkpoint.

    Raises:
        RolloutError: generators failed, or rewards never differed; a checkpoint is saved.
    """
    config: GRPOConfig = run.config
    loss, readout = choose_loss(config, policy_loss(config)), Readout(config.rollout.temperature, entropy=True)
    divergence = config.distillation.loss
    teachers = Teachers(config.teachers, run.further, run.tokenizer)
    run.at_end(teachers.close)
    teachers.check_sources([source.path for source in (*config.data.train, *config.data.validation)])
    of_sources = [teachers.of_source(source.path) for source in config.data.train] if config.teachers else []
    if divergence is not None:
        divergence = teachers.fitted(divergence, policy)
        coefficient = config.distillation.coefficient
        loss = functools.partial(with_divergence, loss=loss, config=divergence, coefficient=coefficient)
        readout = dataclasses.replace(readout, ids=IDS)
    online = OnlineRun(policy, fleet, run)
    teachers.begin()  # before generators take their memory: teachers kept on the host free the device
    online.begin()
    online.resume()
    for step in online.steps():
        groups, batch = online.collect(step)
        with step.time("advantages"):
            batch["advantages"] = advantages = advantages_of(groups, batch, config)
        if config.teachers:
            with step.time("teacher"):
                names = [of_sources[source] for source in sources_of(groups)]
                if divergence is not None:
                    teachers.compare(policy, batch, names, divergence)
                else:
                    judged = teachers.logprobs(batch, names, config.rollout.temperature)
                    step.metrics["train/teacher_kl"] = add_teachers(batch, judged, config)
                    advantages = torch.stack([one.mean() for one in batch["advantages"]])
        online.write_details(step, groups, batch, advantages)
        with step.time("train"):
            epochs = epochs_of(batch, groups, config, run.step)
            parts = [part for epoch in epochs for part in epoch.split()]
            replay, places = bool(batch.routes), online.places(step, len(parts))
            outputs = [
                policy.train_step(part, loss, readout, replay=replay, step_index=place)
                for part, place in zip(parts, places, strict=True)
            ]
        online.end(step, outputs, epochs)
    return online.finish()


def add_teachers(batch: Batch, judged: list[Tensor], config: GRPOConfig) -> float:
    """Adds teachers' judgements to the advantages of rows.

    Args:
        batch: rows with `advantages` and `old_logprobs`.
        judged: log-probability of each row's tokens under its teacher, [n].

    Returns:
        The mean over trained tokens of old minus teacher's log-probability, an estimate of the reverse KL
            divergence.
    """
    own, settings = batch["old_logprobs"], config.distillation
    rows = [*zip(batch.sequences, own, judged, strict=True)]
    batch["advantages"] = [
        advantages + teacher_advantages(old, teacher, row.loss_mask, settings.coefficient, settings.discount)
        for advantages, (row, old, teacher) in zip(batch["advantages"], rows, strict=True)
    ]
    total = batch.sums([old.double() - teacher.double() for _, old, teacher in rows]).sum()
    return total.item() / max(sum(int(row.loss_mask[1:].sum()) for row in batch.sequences), 1)
