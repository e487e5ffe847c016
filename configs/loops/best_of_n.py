"""Best-of-n fine-tuning: the model learns the best of its own completions of each prompt (RAFT, arXiv:2304.06767).

automodel-rl run configs/loops/best_of_n.py --config GRPO.yaml
"""

from automodel_rl import Batch, Fleet, Goal, Policy, Run, sft_loss


def main(policy: Policy, fleet: Fleet, run: Run):
    config = run.config
    rollouts = run.rollouts(fleet, config.rewards)
    prompts, sampling = run.prompts(rollouts.schemas), rollouts.config.rollout.sampling
    policy.begin(config.optimizer, config.length.steps)
    fleet.start(rollouts.config.generator_spec)
    run.resume(Goal(config.length.steps), {"prompts": prompts})
    fleet.sync()
    for step in run.steps(f"the best of {config.rollout.group_size} completions"):
        asked = prompts.take(config.rollout.prompts)
        with fleet.awake(step.time), step.time("rollout"):
            groups = rollouts.collect(asked, config.rollout.group_size, sampling)
        fleet.restore()
        rewarded = [(p, [one for one in of if one.is_rewarded]) for p, of in zip(asked, groups, strict=True)]
        best = [(prompt, max(of, key=lambda one: one.score.total)) for prompt, of in rewarded if of]
        batch = Batch(row for prompt, one in best for row in one.rows(prompt))
        with step.time("train"):
            output = policy.train_step(batch, sft_loss)
        with step.time("sync"):
            fleet.sync()
        step.record([output], policy.size(batch))
        every = [one.score.total for _, of in rewarded for one in of]
        step.metrics["rollout/reward_mean"] = sum(every) / len(every)
        step.metrics["rollout/reward_best"] = sum(one.score.total for _, one in best) / len(best)
    return run.finish()
