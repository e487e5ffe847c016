"""Preference training on single completions labelled good or bad (KTO)."""

import functools
from pathlib import Path

from torch import Tensor

from automodel_rl.batch import Batch
from automodel_rl.config.algorithms import KTOConfig
from automodel_rl.data.loader import LoadedStep
from automodel_rl.losses import LossFn
from automodel_rl.losses.kto import kto_loss, mismatched, reference_point
from automodel_rl.policy.policy import Policy
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.open_run import choose_loss
from automodel_rl.trainers.run import REFERENCE, Run
from automodel_rl.trainers.step import Step
from automodel_rl.trainers.supervised import Objective, train_on_examples


def kto(policy: Policy, run: Run) -> Path:
    """Trains on completions labelled good or bad, with a `KTOConfig`. Returns the folder of the trained checkpoint."""
    config: KTOConfig = run.config
    data, context = ExampleData(run), run.handle.description.context
    policy.begin(config.optimizer, data.total_steps, run.directory.not_finite)
    policy.keep_weights(REFERENCE)  # the model's initial weights, before a checkpoint replaces them
    held_out = data.held_out()

    def prepare(step: Step, loaded: LoadedStep) -> LossFn:
        with step.time("reference"):
            point = add_reference(policy, loaded.batch, config, context)
        step.metrics["train/reference_point"] = point
        return own_loss(config, point)

    def prepare_held_out() -> LossFn:
        return own_loss(config, add_reference(policy, held_out, config, context))

    objective = Objective("completions", prepare, prepare_held_out, samples=data.samples)
    return train_on_examples(run, data, held_out, objective)


def own_loss(config: KTOConfig, point: float) -> LossFn:
    """Returns the loss with this reference point, unless the config names another loss."""
    return choose_loss(config, functools.partial(kto_loss, config=config.loss, reference_point=point))


def add_reference(policy: Policy, batch: Batch, config: KTOConfig, context: int | None) -> float:
    """Adds `ref_logprobs` to rows, and returns the reference point of the global batch.

    Args:
        context: maximum tokens that the model reads; None if unlimited.
    """
    others = Batch([])
    if config.loss.reference_point == "batch":
        others = Batch(mismatched(batch.sequences, _longest(batch, config, context)))
    with policy.with_weights(REFERENCE):
        batch["ref_logprobs"] = policy.logprobs(batch)
        of_reference = _sums(policy, others)
    return reference_point(_sums(policy, others), of_reference)


def _longest(batch: Batch, config: KTOConfig, context: int | None) -> int:
    """Maximum tokens of a prompt with another prompt's completion. Without data.max_tokens, the batch's longest row
    decides, so that the reference point does not depend on the microbatch size."""
    wanted = config.data.max_tokens or max(batch.lengths, default=1)
    return min(limit for limit in (wanted, config.batch.capacity, context) if limit is not None)


def _sums(policy: Policy, batch: Batch) -> Tensor:
    """Summed log-probability of each row's trained tokens, float64 [N]."""
    return batch.sums(policy.logprobs(batch) if len(batch) else [])
