"""Preference training, from pairs of completions to a Hugging Face checkpoint."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import PackedBatch, add_values
from automodel_rl.config import DPOConfig, SourceConfig
from automodel_rl.data.chat import ChatTokenizer, load_tokenizer
from automodel_rl.data.examples import PairDataset
from automodel_rl.data.loader import PackedLoader, PackedStep
from automodel_rl.data.mixture import Draw
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.losses import dpo_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.trainers.run import Run, count_steps, first_loaded, overlong_warning, unweighted, where

Precomputed = dict[tuple[Draw, int], Tensor]
"""Log-probabilities of the reference for each sequence of the data, by `_key`."""


class DPOTrainer:
    """Trains on preferences. Every rank of the job makes one and calls `train`.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in the run directory, or start if there is none.

    Raises:
        InputError: something in the config, the data or the checkpoint is wrong. Nothing has been written.
    """

    def __init__(self, config: DPOConfig, resume: bool = False):
        self.config = config
        directory = RunDirectory(config, config.output, resume)
        self.handle = ModelHandle.from_pretrained(config.model, config.parallel, config.memory)
        torch.manual_seed(config.seed + dist.get_rank())
        self.tokenizer = load_tokenizer(self.handle.source, config.data, self.handle.config.vocab_size)
        seed = config.seed if config.data.shuffle else None
        self.loader = self._loader(config.data.train, seed, config.length.epochs)
        total_steps = count_steps(config.length, self.loader.sampler)
        self.engine = Engine(self.handle, config.optimizer, total_steps)
        # Before a checkpoint takes the place of the weights that training started from.
        self.reference, self.precomputed = self._make_reference()
        self.run = Run(config, directory, self.engine, total_steps, lambda: {"loader": self.loader.state_dict()})
        self.loss = functools.partial(dpo_loss, config=config.loss)
        self.validation = self._validation_rows()
        if resume and (state := self.run.resume()):
            self.loader.load_state_dict(state["loader"])

    def train(self) -> Path:
        """Runs to the end.

        Returns:
            The folder of the trained Hugging Face checkpoint.

        Raises:
            StoppedError: SIGTERM or Ctrl-C came; a checkpoint is saved.
        """
        batches: Iterator[PackedStep] = iter(()) if self.run.is_over else first_loaded(self.loader)
        warning = overlong_warning(self.config.batch.row_tokens)
        for step in self.run.steps(self._summary()):
            with step.time("data"):
                packed = next(batches)
            with step.time("reference"):
                rows = self._with_reference(packed)
            with step.time("train"):
                output = self.engine.train_step(rows, self.loss)
            step.record([output])
            step.record_performance(packed, self.config.batch.row_tokens)
            if self.validation and self.run.validates:
                with step.time("validate"):
                    step.row["val/loss"], metrics = self.engine.evaluate(self.validation, self.loss)
                step.row |= {name.replace("train/", "val/"): value for name, value in metrics.items()}
            if text := warning(packed):
                self.run.say(text)
        self.handle.save_pretrained(self.run.directory.final, self.tokenizer)
        return self.run.finish(f"DPO of {self.config.model.path}", [])

    def _make_reference(self) -> tuple[ReferenceWeights | None, Precomputed]:
        config = self.config
        if not config.loss.needs_reference:
            return None, {}
        if not config.precompute_reference:
            return ReferenceWeights(self.handle), {}
        own: Precomputed = {}
        for packed in self._loader(unweighted(config.data.train), seed=None, epochs=1):
            logprobs = iter(self.engine.logprobs(packed.batches))
            for batch in packed.batches:
                own |= {_key(packed, place): next(logprobs).cpu() for place in batch.order}
        shares: list[Precomputed] = [{}] * config.parallel.num_data_ranks
        dist.all_gather_object(shares, own, group=self.handle.layout.data_control)
        return None, {key: logprobs for share in shares for key, logprobs in share.items()}

    def _with_reference(self, packed: PackedStep) -> list[PackedBatch]:
        """The rows with the reference's log-probabilities, if the loss compares with them."""
        if self.precomputed:
            pieces = [[self.precomputed[_key(packed, place)] for place in batch.order] for batch in packed.batches]
            return [add_values(batch, "ref_logprobs", p) for batch, p in zip(packed.batches, pieces, strict=True)]
        if self.reference is None:
            return packed.batches
        with self.reference.in_place():
            return self.engine.add_logprobs(packed.batches, "ref_logprobs")

    def _summary(self) -> str:
        sampler = self.loader.sampler
        return f"{sampler.batch_size} pairs a step, of {sum(sampler.sizes):,}, {where(self.config, self.handle)}"

    def _loader(self, sources: Sequence[SourceConfig], seed: int | None, epochs: float | None) -> PackedLoader:
        config = self.config
        # What the assistant said within the prompt is no part of either completion.
        chat = ChatTokenizer(self.tokenizer, train_on="last")
        return PackedLoader(
            PairDataset(sources, chat, config.batch.row_tokens, config.data.overlong),
            config.batch.pairs,
            self.handle.layout,
            self.handle.flops,
            num_workers=config.data.num_workers,
            seed=seed,
            epochs=epochs,
        )

    def _validation_rows(self) -> list[PackedBatch]:
        """With log-probabilities of the weights that training starts from."""
        if not self.config.data.validation:
            return []
        loader = self._loader(unweighted(self.config.data.validation), seed=None, epochs=1)
        return [row for packed in loader for row in self.engine.add_logprobs(packed.batches, "ref_logprobs")]


def _key(packed: PackedStep, place: int) -> tuple[Draw, int]:
    """Record, and whether it is its chosen (0) or its rejected (1) sequence, for a place in the global batch."""
    return packed.draws[place // 2], place % 2
