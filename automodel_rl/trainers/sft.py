"""Supervised fine-tuning on chats."""

from pathlib import Path

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.data.loader import LoadedStep
from automodel_rl.losses import LossFn, dft_loss, sft_loss
from automodel_rl.losses.sft import ENTROPY_WEIGHT, eaft_loss, entropy_weights
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.step import Step
from automodel_rl.trainers.supervised import Objective, train_on_examples

LOSSES: dict[str, LossFn] = {"likelihood": sft_loss, "dft": dft_loss, "eaft": eaft_loss}
"""Losses by config name."""


def sft(policy: Policy, run: Run) -> Path:
    """Fine-tunes on chats, with an `SFTConfig`. Returns the folder of the trained checkpoint."""
    config: SFTConfig = run.config
    loss = choose_loss(config, LOSSES[config.loss.kind])
    validation_loss = choose_loss(config, sft_loss)
    data = ExampleData(run)
    held_out = data.held_out()
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)

    def prepare(step: Step, loaded: LoadedStep) -> LossFn:
        if config.loss.kind == "eaft":
            with step.time("entropy"):
                add_entropy_weights(policy, loaded.batch, config)
        return loss

    objective = Objective("chats", prepare, lambda: validation_loss, samples=data.samples)
    return train_on_examples(run, data, held_out, objective)


def add_entropy_weights(policy: Policy, batch: Batch, config: SFTConfig) -> None:
    """Adds the weight of each token's log-probability, computed from the model's entropy there, to rows."""
    top_k = min(config.loss.eaft_top_k, policy.vocab_size)
    tops = [logprobs.double() for logprobs, _ in policy.top_logprobs(batch, top_k)]
    batch[ENTROPY_WEIGHT] = [entropy_weights(logprobs, config.loss.eaft_power) for logprobs in tops]
