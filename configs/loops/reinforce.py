"""REINFORCE with the mean reward as its baseline (Williams, 1992).

automodel-rl run configs/loops/reinforce.py --config GRPO.yaml
"""

import torch

from automodel_rl import Batch, Fleet, Goal, LossOutput, Policy, Run


def loss(outputs, microbatch):
    """Minus the mean over tokens of advantage x log-probability."""
    gain = torch.where(microbatch.loss_mask, microbatch.values["advantages"] * outputs.logprobs, 0.0)
    return LossOutput({"tokens": -gain.sum()})


def main(policy: Policy, fleet: Fleet, run: Run):
    config = run.config
    rollouts = run.rollouts(fleet, config.rewards)
    prompts, sampling = run.prompts(rollouts.schemas), rollouts.config.rollout.sampling
    policy.begin(config.optimizer, config.length.steps)
    fleet.start(rollouts.config.generator_spec)
    run.resume(Goal(config.length.steps), {"prompts": prompts})
    fleet.sync()
    for step in run.steps("REINFORCE"):
        asked = prompts.take(config.rollout.prompts)
        with fleet.awake(step.time), step.time("rollout"):
            groups = rollouts.collect(asked, config.rollout.group_size, sampling)
        fleet.restore()
        pairs = [(p, one) for p, group in zip(asked, groups, strict=True) for one in group if one.is_rewarded]
        rows = [(row, one.score.total) for prompt, one in pairs for row in one.rows(prompt)]
        batch = Batch(row for row, _ in rows)
        rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
        batch["advantages"] = rewards - rewards.mean()
        with step.time("train"):
            output = policy.train_step(batch, loss)
        with step.time("sync"):
            fleet.sync()
        step.record([output], policy.size(batch))
        step.metrics["rollout/reward_mean"] = rewards.mean().item()
    return run.finish()
