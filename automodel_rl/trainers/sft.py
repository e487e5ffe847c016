"""Supervised fine-tuning: from chats to a Hugging Face checkpoint."""

from pathlib import Path

from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.losses import dft_loss, sft_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Goal, Run


def sft(policy: Policy, run: Run) -> Path:
    """Fine-tunes on chats. The config is an `SFTConfig`.

    Args:
        policy: the model in training.
        run: the frame around the steps.

    Returns:
        The folder of the trained checkpoint.
    """
    config: SFTConfig = run.config
    loss = choose_loss(config, dft_loss if config.loss.kind == "dft" else sft_loss)
    validation_loss = choose_loss(config, sft_loss)
    data = ExampleData(run)
    held_out = data.once(config.data.validation)
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    run.resume(Goal(data.total_steps), {"data": data.train})
    run.save_examples(data.examples)
    batches = data.steps()
    for step in run.steps(f"{data.per_step} chats a step, of {data.num_records:,}"):
        with step.time("data"):
            loaded = next(batches)
        with step.time("train"):
            output = policy.train_step(loaded.batch, loss)
        step.record([output], policy.size(loaded.batch))
        run.note_overlong(step, loaded)
        if len(held_out) and run.validates:
            with step.time("validate"):
                step.metrics["val/loss"], _ = policy.evaluate(held_out, validation_loss)
    return run.finish(data.samples)
