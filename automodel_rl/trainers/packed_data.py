"""Data that exists before a run starts, such as chats and preference pairs, packed into steps."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from automodel_rl.config import SourceConfig
from automodel_rl.config.algorithms import DPOConfig, SFTConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.ends import completion_ends
from automodel_rl.data.examples import ExampleDataset
from automodel_rl.data.loader import PackedLoader, PackedStep
from automodel_rl.data.sampler import Order
from automodel_rl.data.show import ShownExample, examples_of
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.model.handle import ModelHandle
from automodel_rl.observe.samples import Sample
from automodel_rl.trainers.samples import greedy_samples


class PackedData:
    """A run's examples, packed into steps.

    Args:
        config: the run's config.
        kind: the class that makes examples of records.
        chat: makes token sequences of messages.
        handle: the model, whose layout gets the microbatches.

    Attributes:
        train: loads the run's steps. A run can resume between any two of them.

    Raises:
        InputError: the run is shorter than one example.
    """

    def __init__(
        self, config: SFTConfig | DPOConfig, kind: type[ExampleDataset], chat: ChatTokenizer, handle: ModelHandle
    ):
        self.config, self.kind, self.chat, self.handle = config, kind, chat, handle
        seed = config.seed if config.data.shuffle else None
        self.train = self._loader(config.data.train, seed, config.length.epochs)
        self.total_steps = config.length.steps or len(self.train.sampler)
        if self.total_steps == 0:
            raise InputError(f"length.epochs={config.length.epochs} is less than one example: raise it, or give steps")

    def steps(self) -> Iterator[PackedStep]:
        """The steps that are left. The first one is loaded now, so that its errors come before anything is written."""
        stream = iter(self.train)
        return itertools.chain([next(stream)], stream)

    def every_record(self, sources: Sequence[SourceConfig]) -> PackedLoader:
        """A loader that draws each record of some sources once, whatever the sources' weights."""
        unweighted = [source.model_copy(update={"weight": None}) for source in sources]
        return self._loader(unweighted, seed=None, epochs=1)

    def examples(self) -> list[ShownExample]:
        """The first records of the training data, as they are before any is cut."""
        return examples_of(self.config, self.config.observe.samples, self.chat)

    def samples(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> list[Sample]:
        """Greedy completions for the first prompts of the validation data, else of the training data. A collective.

        Args:
            engine: the model's engine.
            tokenizer: the model's tokenizer.
            say: prints a line, of how many tokens are written where that is slow.
        """
        config = self.config
        dataset = self._dataset(config.data.validation or config.data.train)
        first = range(min(config.observe.samples, dataset.sources.sizes[0]))
        prompts = [prompt for prompt in (dataset.prompt((0, number)) for number in first) if prompt is not None]
        # A prompt is empty if the chat starts with the assistant, and may be longer than any trained microbatch.
        fitting = [(prompt, expected) for prompt, expected in prompts if 0 < len(prompt) < config.batch.capacity]
        handle, variables = self.handle, config.data.chat_template_kwargs
        ends = completion_ends(handle.source, handle.whole_config, tokenizer, variables)
        return greedy_samples(engine, tokenizer, fitting, config.observe.sample_tokens, ends, say)

    def _dataset(self, sources: Sequence[SourceConfig]) -> ExampleDataset:
        return self.kind(sources, self.chat, self.config.batch, self.handle.description.context, self.config.data)

    def _loader(self, sources: Sequence[SourceConfig], seed: int | None, epochs: float | None) -> PackedLoader:
        return PackedLoader(
            self._dataset(sources),
            self.config.sequences_per_step // self.kind.together,
            self.handle.layout,
            self.handle.flops,
            Order(seed, epochs),
            num_workers=self.config.data.num_workers,
        )
