"""Preference training on pairs of completions (DPO)."""

import functools
from pathlib import Path

from torch import Tensor

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import DPOConfig
from automodel_rl.data.loader import LoadedStep
from automodel_rl.data.sampler import Draw
from automodel_rl.losses import LossFn, dpo_loss
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import REFERENCE, Run
from automodel_rl.trainers.step import Step
from automodel_rl.trainers.supervised import Objective, train_on_examples


def dpo(policy: Policy, run: Run) -> Path:
    """Trains on preferences, with a `DPOConfig`. Returns the folder of the trained checkpoint."""
    config: DPOConfig = run.config
    loss = choose_loss(config, functools.partial(dpo_loss, config=config.loss))
    data = ExampleData(run)
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    # The reference uses the model's initial weights, before a checkpoint replaces them.
    reference = Reference(policy, config, data)
    held_out = data.held_out()
    reference.score(held_out)

    def prepare(step: Step, loaded: LoadedStep) -> LossFn:
        with step.time("reference"):
            reference.add_to(loaded)
        return loss

    return train_on_examples(run, data, held_out, Objective("pairs", prepare, lambda: loss, samples=data.samples))


class Reference:
    """Log-probabilities under the run's initial weights, if the loss needs them: computed in each step, or once for
    all pairs.

    Args:
        policy: the model, before its first step.
    """

    def __init__(self, policy: Policy, config: DPOConfig, data: ExampleData):
        self.policy, self.is_needed = policy, config.loss.needs_reference
        self.precomputed: dict[tuple[Draw, int], Tensor] = {}
        if self.is_needed and config.precompute_reference:
            for loaded in data.every_record(config.data.train):
                self.precomputed |= zip(_keys(loaded.draws), policy.logprobs(loaded.batch), strict=True)
        elif self.is_needed:
            policy.keep_weights(REFERENCE)

    def add_to(self, loaded: LoadedStep) -> None:
        """Adds `ref_logprobs` to a step's rows, if the loss needs them."""
        if self.precomputed:
            loaded.batch["ref_logprobs"] = [self.precomputed[key] for key in _keys(loaded.draws)]
        elif self.is_needed:
            with self.policy.with_weights(REFERENCE):
                self.score(loaded.batch)

    def score(self, batch: Batch) -> None:
        """Adds `ref_logprobs` under the model's current weights, if the loss needs them."""
        if self.is_needed and len(batch):
            batch["ref_logprobs"] = self.policy.logprobs(batch)


def _keys(draws: tuple[Draw, ...]) -> list[tuple[Draw, int]]:
    """Keys of rows: the draw of the pair, and 0 for the chosen or 1 for the rejected sequence."""
    return [(draw, place) for draw in draws for place in (0, 1)]
