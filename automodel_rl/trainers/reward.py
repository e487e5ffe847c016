"""Reward models: from pairs of completions to a sequence classifier of transformers."""

import functools
from pathlib import Path

from automodel_rl.config.algorithms import RewardModelConfig
from automodel_rl.losses import Readout, reward_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Goal, Run

SCORES = Readout(scores=True)


def reward(policy: Policy, run: Run) -> Path:
    """Trains a reward model on preferences. The config is a `RewardModelConfig`.

    Args:
        policy: the model in training, with a linear head.
        run: the frame around the steps.

    Returns:
        The folder of the trained checkpoint.
    """
    config: RewardModelConfig = run.config
    loss = choose_loss(config, functools.partial(reward_loss, config=config.loss))
    data = ExampleData(run)
    held_out = data.held_out()
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    run.resume(Goal(data.total_steps), {"data": data.train})
    batches = data.steps()
    run.save_examples(data.examples)
    for step in run.steps(f"{data.per_step} pairs a step, of {data.num_records:,}"):
        with step.time("data"):
            loaded = next(batches)
        with step.time("train"):
            output = policy.train_step(loaded.batch, loss, SCORES)
        step.record([output], policy.size(loaded.batch))
        data.note(step, loaded)
        if len(held_out) and run.validates:
            with step.time("validate"):
                step.metrics["val/loss"], metrics = policy.evaluate(held_out, loss, SCORES)
            step.metrics |= {name.replace("train/", "val/"): value for name, value in metrics.items()}
    return run.finish()
