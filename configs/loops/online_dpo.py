"""Online DPO: the model learns to prefer the best of its own completions to the worst (arXiv:2402.04792).

automodel-rl run configs/loops/online_dpo.py --config GRPO.yaml
"""

import functools

from automodel_rl import Batch, DPOLossConfig, Fleet, Goal, Policy, Run, dpo_loss
from automodel_rl.errors import RolloutError

LOSS = DPOLossConfig(beta=0.1)
MAX_TRIES = 10
"""Rounds of completions in a step after which the program gives up, if in no group rewards differ."""


def best_and_worst(prompt, group):
    """The rows of a group's best and worst completion. Of equal rewards none is better, and an agent's history that
    forked has several rows: such a group has no pair."""
    ranked = sorted((one for one in group if one.is_rewarded), key=lambda one: -one.score.total)
    if ranked and ranked[0].score.total > ranked[-1].score.total:
        best, worst = (one.rows(prompt) for one in (ranked[0], ranked[-1]))
        if len(best) == len(worst) == 1:
            yield best[0], worst[0]


def main(policy: Policy, fleet: Fleet, run: Run):
    config, loss = run.config, functools.partial(dpo_loss, config=LOSS)
    rollouts = run.rollouts(fleet, config.rewards)
    prompts, sampling = run.prompts(rollouts.schemas), rollouts.config.rollout.sampling
    policy.begin(config.optimizer, config.length.steps)
    policy.keep_weights("reference")
    fleet.start(rollouts.config.generator_spec)
    run.resume(Goal(config.length.steps), {"prompts": prompts})
    fleet.sync()
    for step in run.steps(f"the best and the worst of {config.rollout.group_size} completions"):
        pairs, every = [], []
        for _ in range(MAX_TRIES):
            asked = prompts.take(config.rollout.prompts)
            with fleet.awake(step.time), step.time("rollout"):
                groups = rollouts.collect(asked, config.rollout.group_size, sampling)
            fleet.restore()
            every += [one.score.total for of in groups for one in of if one.is_rewarded]
            pairs = [pair for group in zip(asked, groups, strict=True) for pair in best_and_worst(*group)]
            if pairs:
                break
        else:
            raise RolloutError(f"{MAX_TRIES} rounds of completions, and in no group do rewards differ")
        batch = Batch((row for pair in pairs for row in pair), sequences_per_example=2)
        with step.time("reference"), policy.with_weights("reference"):
            batch["ref_logprobs"] = policy.logprobs(batch)
        with step.time("train"):
            output = policy.train_step(batch, loss)
        with step.time("sync"):
            fleet.sync()
        step.record([output], policy.size(batch))
        step.metrics["rollout/reward_mean"] = sum(every) / len(every)
        step.metrics["rollout/pairs"] = len(pairs)
    return run.finish()
