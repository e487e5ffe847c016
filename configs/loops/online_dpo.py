"""Online DPO: the model learns to prefer the best of its own completions to the worst (arXiv:2402.04792).

automodel-rl run configs/loops/online_dpo.py --config GRPO.yaml
"""

import functools

from automodel_rl import Batch, DPOLossConfig, Fleet, Goal, Policy, Run, dpo_loss

LOSS = DPOLossConfig(beta=0.1)


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
        asked = prompts.take(config.rollout.prompts)
        with fleet.awake(step.time), step.time("rollout"):
            groups = rollouts.collect(asked, config.rollout.group_size, sampling)
        fleet.restore()
        ranked = [
            (prompt, sorted((one for one in of if one.is_rewarded), key=lambda one: -one.score.total))
            for prompt, of in zip(asked, groups, strict=True)
        ]
        # Of equal rewards none is better: such a group is no pair.
        pairs = [(prompt, of[0], of[-1]) for prompt, of in ranked if of and of[0].score.total > of[-1].score.total]
        batch = Batch((row for prompt, *of in pairs for one in of for row in one.rows(prompt)), together=2)
        with step.time("reference"), policy.with_weights("reference"):
            batch["ref_logprobs"] = policy.logprobs(batch)
        with step.time("train"):
            output = policy.train_step(batch, loss)
        with step.time("sync"):
            fleet.sync()
        step.record([output], policy.size(batch))
        every = [one.score.total for _, of in ranked for one in of]
        step.metrics["rollout/reward_mean"] = sum(every) / len(every)
        step.metrics["rollout/pairs"] = len(pairs)
    return run.finish()
