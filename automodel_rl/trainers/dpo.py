"""Preference training (DPO): from a config and pairs of completions to a Hugging Face checkpoint."""

import functools
from pathlib import Path

from torch import Tensor

from automodel_rl.batch import Microbatch, add_values
from automodel_rl.config.algorithms import DPOConfig
from automodel_rl.data.examples import PairDataset
from automodel_rl.data.loader import PackedStep
from automodel_rl.data.sampler import Draw
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.losses import dpo_loss
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.trainers.open_run import choose_loss, layout_summary, open_run
from automodel_rl.trainers.packed_data import PackedData
from automodel_rl.trainers.run import Goal, Run

Precomputed = dict[tuple[Draw, int], Tensor]
"""The reference's log-probabilities of each sequence of the data, by `_key`."""


class DPOTrainer:
    """Trains on preferences. Every rank of the job makes one and calls `train`.

    Args:
        config: the run's config.
        resume: "auto" to go on from the newest checkpoint in the run directory, or begin if there is none; "never" to
            begin; or the folder of a checkpoint to go on from.
        max_minutes: minutes after which the run saves and stops; None for no limit.

    Raises:
        InputError: the config, the data or the checkpoint is wrong. Nothing has been written.

    Example:
        >>> DPOTrainer(load_config("my_dpo.yaml")).train().name  # doctest: +ELLIPSIS
        loading ...
        1 steps: ...
        'final'
    """

    def __init__(self, config: DPOConfig, resume: str = "never", max_minutes: float | None = None):
        self.loss = choose_loss(config, functools.partial(dpo_loss, config=config.loss))
        config, directory, chat, self.handle = open_run(config, resume)
        self.config = config
        self.tokenizer = chat.tokenizer
        self.data = PackedData(config, PairDataset, chat, self.handle)
        self.engine = Engine(self.handle, config.optimizer, self.data.total_steps)
        # The reference is made of the model's first weights, before a checkpoint replaces them.
        self.reference, self.precomputed = self._make_reference()
        self.validation = [
            microbatch
            for packed in self.data.every_record(config.data.validation)
            for microbatch in self._scored(packed)
        ]
        self.run = Run(config, directory, self.engine, Goal(self.data.total_steps, max_minutes))
        self.run.resume({"data": self.data.train})

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: the run was stopped by SIGTERM, SIGHUP, Ctrl-C or its time limit; a checkpoint is saved.
        """
        if self.run.is_finished:
            return self.run.leave_finished()
        self.run.save_examples(self.data.examples)
        data = iter(()) if self.run.is_over else self.data.steps()
        for step in self.run.steps(self._summary()):
            with step.time("data"):
                packed = next(data)
            with step.time("reference"):
                microbatches = self._with_reference(packed)
            with step.time("train"):
                output = self.engine.train_step(microbatches, self.loss)
            step.record([output], packed.size)
            self.run.note_overlong(step, packed)
            if self.config.data.validation and self.run.validates:
                with step.time("validate"):
                    step.metrics["val/loss"], metrics = self.engine.evaluate(self.validation, self.loss)
                step.metrics |= {name.replace("train/", "val/"): value for name, value in metrics.items()}
        self.run.save_model(self.tokenizer)
        self.run.save_samples(self.data.samples(self.engine, self.tokenizer, self.run.say))
        return self.run.finish()

    def _make_reference(self) -> tuple[ReferenceWeights | None, Precomputed]:
        """The reference: weights to swap in for each step, or precomputed log-probabilities of all pairs."""
        config = self.config
        if not config.loss.needs_reference:
            return None, {}
        if not config.precompute_reference:
            return ReferenceWeights(self.handle), {}
        own: Precomputed = {}
        for packed in self.data.every_record(config.data.train):
            logprobs = iter(self.engine.logprobs(packed.microbatches))
            for microbatch in packed.microbatches:
                own |= {_key(packed, place): next(logprobs).cpu() for place in microbatch.order}
        shares = gather_objects(own, self.handle.layout.data_control)
        return None, {key: logprobs for share in shares for key, logprobs in share.items()}

    def _scored(self, packed: PackedStep) -> list[Microbatch]:
        """The microbatches, with the current weights' log-probabilities as `ref_logprobs` if the loss needs them."""
        if not self.config.loss.needs_reference:
            return packed.microbatches
        return self.engine.add_logprobs(packed.microbatches, "ref_logprobs")

    def _with_reference(self, packed: PackedStep) -> list[Microbatch]:
        """The microbatches with the reference's log-probabilities, if the loss needs a reference."""
        if self.precomputed:
            pieces = [
                [self.precomputed[_key(packed, place)] for place in microbatch.order]
                for microbatch in packed.microbatches
            ]
            return [
                add_values(microbatch, "ref_logprobs", p)
                for microbatch, p in zip(packed.microbatches, pieces, strict=True)
            ]
        if self.reference is None:
            return packed.microbatches
        with self.reference.in_place():
            return self._scored(packed)

    def _summary(self) -> str:
        sampler = self.data.train.sampler
        pairs = f"{sampler.batch_size} pairs a step, of {sum(sampler.sizes):,}"
        return f"{pairs}, {layout_summary(self.config, self.handle)}"


def _key(packed: PackedStep, place: int) -> tuple[Draw, int]:
    """The draw of the record at a place in the global batch, and 0 for its chosen or 1 for its rejected sequence."""
    return packed.draws[place // 2], place % 2
