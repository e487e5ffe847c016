"""Self-distillation: the model learns to write without the answer as its first weights do with it (as in SDFT).

automodel-rl run configs/loops/self_distillation.py --config GRPO.yaml

Records have the `answer`. Both see the same completions, which the model writes; rewards are only looked at.
"""

import functools

import torch

from automodel_rl import Batch, DistillLossConfig, Fleet, Goal, Policy, Readout, Run, TokenSequence, distill_loss

LOSS = DistillLossConfig(divergence="forward_kl", top_k=20)
HINT = "{question}\n\nThe answer is {answer}."


def with_answer(prompt, tokenizer) -> list[int]:
    """The tokens of a prompt that tells the answer."""
    *before, last = prompt.messages
    told = HINT.format(question=last["content"], answer=prompt.example["answer"])
    return tokenizer.apply_chat_template(
        [*before, {**last, "content": told}], add_generation_prompt=True, return_dict=False
    )


def moved(values, start: int, row: TokenSequence, filling: float):
    """Values of a completion that begins at a place of another row, for the completion of this one, [n, K]."""
    completion = values[start:]
    before = completion.new_full((len(row) - len(completion), completion.shape[1]), filling)
    return torch.cat([before, completion])


def main(policy: Policy, fleet: Fleet, run: Run):
    config, loss = run.config, functools.partial(distill_loss, config=LOSS)
    rollouts = run.rollouts(fleet, config.rewards)
    prompts, sampling = run.prompts(rollouts.schemas), rollouts.config.rollout.sampling
    policy.begin(config.optimizer, config.length.steps)
    policy.keep_weights("teacher")
    fleet.start(rollouts.config.generator_spec)
    run.resume(Goal(config.length.steps), {"prompts": prompts})
    fleet.sync()
    for step in run.steps("self-distillation"):
        asked = prompts.take(config.rollout.prompts)
        with fleet.awake(step.time), step.time("rollout"):
            groups = rollouts.collect(asked, config.rollout.group_size, sampling)
        fleet.restore()
        pairs = [(p, one) for p, group in zip(asked, groups, strict=True) for one in group if one.is_rewarded]
        rows = [(prompt, row) for prompt, one in pairs for row in one.rows(prompt)]
        own, told, starts = [], [], []
        for prompt, row in rows:
            opening, start = torch.tensor(with_answer(prompt, run.tokenizer)), len(prompt.token_ids)
            ids, mask = torch.cat([opening, row.input_ids[start:]]), torch.zeros(len(opening), dtype=torch.bool)
            if len(ids) <= policy.packing.capacity:  # else there is no room for the answer
                own.append(row)
                starts.append(len(opening))
                told.append(TokenSequence(ids, torch.cat([mask, row.loss_mask[start:]])))
        batch = Batch(own)
        with step.time("teacher"), policy.with_weights("teacher"):
            tops = policy.top_logprobs(Batch(told), LOSS.top_k)
        places = [*zip(tops, starts, batch.sequences, strict=True)]
        batch["teacher_logprobs"] = [moved(values, start, row, 0.0) for (values, _), start, row in places]
        batch["compared_ids"] = [moved(ids, start, row, -1) for (_, ids), start, row in places]
        with step.time("train"):
            output = policy.train_step(batch, loss, Readout(ids="compared_ids"))
        with step.time("sync"):
            fleet.sync()
        step.record([output], policy.size(batch))
        step.metrics["rollout/reward_mean"] = sum(one.score.total for _, one in pairs) / len(pairs)
    return run.finish()
