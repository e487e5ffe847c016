"""Data that exist before a run starts, such as chats and preference pairs."""

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

from automodel_rl.batch import Batch
from automodel_rl.config import SourceConfig
from automodel_rl.config.algorithms import DistillConfig, DPOConfig, KTOConfig, RewardModelConfig, SFTConfig
from automodel_rl.data.examples import DATASETS, ExampleDataset
from automodel_rl.data.loader import ExampleLoader, LoadedStep
from automodel_rl.data.sampler import Order
from automodel_rl.data.show import ShownExample, examples_of
from automodel_rl.data.stop_tokens import completion_stop_ids
from automodel_rl.errors import InputError
from automodel_rl.trainers.left_out import LeftOut
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.samples import Sample, greedy_samples
from automodel_rl.trainers.step import Step

MAX_WORKERS = 8
"""Default limit on tokenizing worker processes."""


class ExampleData:
    """A run's examples.

    Attributes:
        train: loader of the run's steps. A run can resume between any two of them.

    Raises:
        InputError: the run is shorter than one example.
    """

    def __init__(self, run: Run):
        self.run = run
        self.left_out = LeftOut(run.say)
        self.config = cast(SFTConfig | DPOConfig | KTOConfig | RewardModelConfig | DistillConfig, run.config)
        config = self.config
        self.kind = DATASETS[config.record_type]
        self.train = self._loader(config.data.train, config.seed if config.data.shuffle else None, config.length.epochs)
        self.total_steps = config.length.steps or len(self.train.sampler)
        if self.total_steps == 0:
            raise InputError(
                f"length.epochs={config.length.epochs} is less than one example: raise it, or set length.steps"
            )

    @property
    def per_step(self) -> int:
        return self.train.sampler.batch_size

    @property
    def num_records(self) -> int:
        return sum(self.train.sampler.sizes)

    def steps(self) -> Iterator[LoadedStep]:
        """Returns the remaining steps. Loads the first one now, so that its errors are raised before anything is
        written.

        Raises:
            InputError: a record of the first step is refused, or no record has anything to train on.
        """
        if self.run.is_over:
            return iter(())
        stream = iter(self.train)
        first = next(stream)
        if not len(first.batch):
            self.train.dataset.check_fit()
        return itertools.chain([first], stream)

    def note(self, step: Step, loaded: LoadedStep) -> None:
        """Adds the counts of cut, dropped and refused examples to the step's metrics, and warns of the first.
        Includes those of the validation data in steps that validate."""
        step.metrics |= self.left_out.note_step(loaded) | (self.left_out.held_out if self.run.validates else {})

    def held_out(self) -> Batch:
        """Returns every validation record once, as a batch with one part per loaded step."""
        loaded = [*self.every_record(self.config.data.validation)]
        self.left_out.note_held_out(loaded)
        loaded = [step for step in loaded if len(step.batch)]
        rows, parts = itertools.count(), []
        for step in loaded:
            parts.append([*itertools.islice(rows, len(step.batch))])
        sequences = [sequence for step in loaded for sequence in step.batch.sequences]
        return Batch(sequences, sequences_per_example=self.kind.sequences_per_example, parts=parts)

    def every_record(self, sources: Sequence[SourceConfig]) -> Iterator[LoadedStep]:
        """Loads every record of some sources once, ignoring the sources' weights."""
        unweighted = [source.model_copy(update={"weight": None}) for source in sources]
        return iter(self._loader(unweighted, seed=None, epochs=1) if sources else ())

    def examples(self) -> list[ShownExample]:
        context = self.run.handle.description.context
        return examples_of(self.config, self.config.observe.samples, self.run.chat, context)

    def samples(self) -> list[Sample]:
        """Generates greedy completions for the first prompts of the validation data, or of the training data if
        there is none."""
        config, run = self.config, self.run
        dataset = self._dataset(config.data.validation or config.data.train)
        first = range(min(config.observe.samples, dataset.sources.sizes[0]))
        prompts = [prompt for prompt in (dataset.prompt((0, number)) for number in first) if prompt is not None]
        # A prompt is empty if the chat starts with the assistant; it may exceed the size of a microbatch.
        fitting = [(prompt, expected) for prompt, expected in prompts if 0 < len(prompt) < config.batch.capacity]
        handle, variables = run.handle, config.data.chat_template_kwargs
        ends = completion_stop_ids(handle.source, handle.whole_config, run.tokenizer, variables)
        return greedy_samples(run.policy, run.tokenizer, fitting, config.observe.sample_tokens, ends, run.say)

    def _dataset(self, sources: Sequence[SourceConfig]) -> ExampleDataset:
        config = self.config
        return self.kind(sources, self.run.chat, config.batch, self.run.handle.description.context, config.data)

    def _loader(self, sources: Sequence[SourceConfig], seed: int | None, epochs: float | None) -> ExampleLoader:
        return ExampleLoader(
            self._dataset(sources),
            self.config.sequences_per_step // self.kind.sequences_per_example,
            Order(seed, epochs),
            num_workers=self._num_workers,
        )

    @property
    def _num_workers(self) -> int:
        """Tokenizing processes: as configured, else one per data rank, as each rank adds as many tokens to a step."""
        given, ranks = self.config.data.num_workers, self.config.parallel.num_data_ranks
        return given if given is not None else min(ranks, MAX_WORKERS) if ranks > 1 else 0
