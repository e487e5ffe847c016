"""Distillation: from chats and teachers to a Hugging Face checkpoint of a student."""

import functools
from pathlib import Path

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import DistillConfig
from automodel_rl.losses import Readout
from automodel_rl.losses.distill import IDS, distill_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Goal, Run
from automodel_rl.trainers.teachers import Teachers


def distill(policy: Policy, run: Run) -> Path:
    """Teaches a student its teachers' distributions. The config is a `DistillConfig`.

    Args:
        policy: the student.
        run: the frame around the steps, with the teachers.

    Returns:
        The folder of the trained checkpoint.
    """
    config: DistillConfig = run.config
    teachers = Teachers(config.teachers, run.further, run.tokenizer)
    run.at_end(teachers.close)
    teachers.check_sources([source.path for source in (*config.data.train, *config.data.validation)])
    own = teachers.fitted(config.loss, policy)
    loss = choose_loss(config, functools.partial(distill_loss, config=own))
    readout = Readout(own.temperature, ids=IDS)
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
    run.resume(Goal(data.total_steps), {"data": data.train})
    batches = data.steps()
    run.save_examples(data.examples)
    for step in run.steps(f"{data.per_step} chats a step, of {data.num_records:,}"):
        with step.time("data"):
            loaded = next(batches)
        with step.time("teacher"):
            teachers.compare(policy, loaded.batch, [of_sources[source] for source, _ in loaded.draws], own)
        with step.time("train"):
            output = policy.train_step(loaded.batch, loss, readout)
        step.record([output], policy.size(loaded.batch))
        data.note(step, loaded)
        if len(held_out) and run.validates:
            with step.time("validate"):
                teachers.compare(policy, held_out, names, own)
                step.metrics["val/loss"], metrics = policy.evaluate(held_out, loss, readout)
            step.metrics |= {name.replace("train/", "val/"): value for name, value in metrics.items()}
    return run.finish(data.samples)
