"""Distillation: trains a student on chats and its teachers' distributions."""

import functools
from pathlib import Path

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import DistillConfig
from automodel_rl.data.loader import LoadedStep
from automodel_rl.losses import LossFn, Readout
from automodel_rl.losses.distill import IDS, distill_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.step import Step
from automodel_rl.trainers.supervised import Objective, train_on_examples
from automodel_rl.trainers.teachers import Teachers


def distill(policy: Policy, run: Run) -> Path:
    """Trains a student to match its teachers' distributions, with a `DistillConfig`. Returns the folder of its
    checkpoint."""
    config: DistillConfig = run.config
    teachers = Teachers(config.teachers, run.further, run.tokenizer)
    run.at_end(teachers.close)
    teachers.check_sources([source.path for source in (*config.data.train, *config.data.validation)])
    own = teachers.fitted(config.loss, policy)
    loss = choose_loss(config, functools.partial(distill_loss, config=own))
    data = ExampleData(run)
    of_sources = [teachers.of_source(source.path) for source in config.data.train]
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    teachers.begin()
    held_out = Batch([])
    if config.data.validation:
        held_out = data.held_out()
        of_held_out = [teachers.of_source(source.path) for source in config.data.validation]
        draws = [draw for loaded in data.every_record(config.data.validation) for draw in loaded.draws]
        names = [of_held_out[source] for source, _ in draws]

    def prepare(step: Step, loaded: LoadedStep) -> LossFn:
        with step.time("teacher"):
            teachers.compare(policy, loaded.batch, [of_sources[source] for source, _ in loaded.draws], own)
        return loss

    def prepare_held_out() -> LossFn:
        teachers.compare(policy, held_out, names, own)
        return loss

    objective = Objective("chats", prepare, prepare_held_out, Readout(own.temperature, ids=IDS), data.samples)
    return train_on_examples(run, data, held_out, objective)
