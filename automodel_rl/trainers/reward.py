"""Reward models: from pairs of completions to a transformers sequence classifier."""

import functools
from pathlib import Path

from automodel_rl.config.algorithms import RewardModelConfig
from automodel_rl.losses import Readout, reward_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.supervised import Objective, train_on_examples


def reward(policy: Policy, run: Run) -> Path:
    """Trains a reward model on preferences, with a `RewardModelConfig`. Returns the folder of the trained
    checkpoint."""
    config: RewardModelConfig = run.config
    loss = choose_loss(config, functools.partial(reward_loss, config=config.loss))
    data = ExampleData(run)
    held_out = data.held_out()
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    objective = Objective("pairs", lambda step, loaded: loss, lambda: loss, Readout(scores=True))
    return train_on_examples(run, data, held_out, objective)
