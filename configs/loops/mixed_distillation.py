"""A mix of data and samples: a student learns from a teacher on answers of records and on its own (GKD,
arXiv:2306.13649).

automodel-rl run configs/loops/mixed_distillation.py --config GRPO_WITH_A_TEACHER.yaml

The config has one teacher, `large`. Records have an `answer`, which is learned from in place of an own one.
"""

import functools
import random

from automodel_rl import Batch, DistillLossConfig, Fleet, Goal, Policy, Readout, Run, TokenSequence, distill_loss
from automodel_rl.data.messages import Chat
from automodel_rl.trainers.teachers import Teachers

LOSS = DistillLossConfig(divergence="jsd", beta=0.5, top_k=20)
OWN = 0.5
"""Share of prompts for which the student writes."""


def main(policy: Policy, fleet: Fleet, run: Run):
    config, loss = run.config, functools.partial(distill_loss, config=LOSS)
    teachers = Teachers(config.teachers, run.further, run.tokenizer)
    rollouts = run.rollouts(fleet, config.rewards)
    prompts, sampling = run.prompts(rollouts.schemas), rollouts.config.rollout.sampling
    policy.begin(config.optimizer, config.length.steps)
    teachers.begin()
    fleet.start(rollouts.config.generator_spec)
    run.resume(Goal(config.length.steps), {"prompts": prompts})
    fleet.sync()
    for step in run.steps(f"distillation, {OWN:.0%} on own completions"):
        asked = prompts.take(config.rollout.prompts)
        # Drawn from the prompt's own number, so that a resumed run draws as one that was never stopped.
        is_own = [random.Random(f"{config.seed} {p.number}").random() < OWN for p in asked]
        own = [prompt for prompt, writes in zip(asked, is_own, strict=True) if writes]
        with fleet.awake(step.time), step.time("rollout"):
            groups = rollouts.collect(own, config.rollout.group_size, sampling)
        fleet.restore()
        pairs = [(p, one) for p, group in zip(own, groups, strict=True) for one in group if one.is_rewarded]
        rows = [row for prompt, one in pairs for row in one.rows(prompt)]
        written = [TokenSequence(row.input_ids, row.loss_mask) for row in rows]
        given = [answered(prompt, run) for prompt, writes in zip(asked, is_own, strict=True) if not writes]
        batch = Batch([*written, *(row for row in given if len(row) <= config.longest_sequence)])
        with step.time("teacher"):
            teachers.compare(policy, batch, ["large"] * len(batch), LOSS)
        with step.time("train"):
            output = policy.train_step(batch, loss, Readout(ids="compared_ids"))
        with step.time("sync"):
            fleet.sync()
        step.record([output], policy.size(batch))
        step.metrics["rollout/own_rows"] = len(written)
    return run.finish()


def answered(prompt, run: Run) -> TokenSequence:
    """The row of a prompt with its record's answer."""
    answer = {"role": "assistant", "content": prompt.example["answer"]}
    return run.chat(Chat([*prompt.messages, answer], start=len(prompt.messages)), f"prompt {prompt.number}")
