"""Supervised fine-tuning: from chats to a Hugging Face checkpoint."""

from pathlib import Path

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.losses import LossFn, dft_loss, sft_loss
from automodel_rl.losses.sft import ENTROPY_WEIGHT, eaft_loss, entropy_weights
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Goal, Run

LOSSES: dict[str, LossFn] = {"likelihood": sft_loss, "dft": dft_loss, "eaft": eaft_loss}
"""The losses by their names in a config."""


def sft(policy: Policy, run: Run) -> Path:
    """Fine-tunes on chats. The config is an `SFTConfig`.

    Args:
        policy: the model in training.
        run: the frame around the steps.

    Returns:
        The folder of the trained checkpoint.
    """
    config: SFTConfig = run.config
    loss = choose_loss(config, LOSSES[config.loss.kind])
    validation_loss = choose_loss(config, sft_loss)
    data = ExampleData(run)
    held_out = data.held_out()
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    run.resume(Goal(data.total_steps), {"data": data.train})
    batches = data.steps()
    run.save_examples(data.examples)
    for step in run.steps(f"{data.per_step} chats a step, of {data.num_records:,}"):
        with step.time("data"):
            loaded = next(batches)
        if config.loss.kind == "eaft":
            with step.time("entropy"):
                add_entropy_weights(policy, loaded.batch, config)
        with step.time("train"):
            output = policy.train_step(loaded.batch, loss)
        step.record([output], policy.size(loaded.batch))
        data.note(step, loaded)
        if len(held_out) and run.validates:
            with step.time("validate"):
                step.metrics["val/loss"], _ = policy.evaluate(held_out, validation_loss)
    return run.finish(data.samples)


def add_entropy_weights(policy: Policy, batch: Batch, config: SFTConfig) -> None:
    """Gives rows the weight of each token's log-probability by the model's entropy there.

    Args:
        policy: the model in training.
        batch: the rows.
        config: the run's config.
    """
    top_k = min(config.loss.eaft_top_k, policy.vocab_size)
    tops = [logprobs.double() for logprobs, _ in policy.top_logprobs(batch, top_k)]
    batch[ENTROPY_WEIGHT] = [entropy_weights(logprobs, config.loss.eaft_power) for logprobs in tops]
