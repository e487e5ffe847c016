"""Where examples come from and how they become token sequences and microbatches."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from automodel_rl.config.base import BatchSize, PathText, Positive, Section

Column = Literal["messages", "images", "prompt", "chosen", "rejected", "answer", "tools"]


class SourceConfig(Section):
    path: PathText
    """A JSON-lines file, or the id (or folder) of a dataset that `datasets.load_dataset` opens."""

    split: str = "train"
    """Split of a dataset id; a JSON-lines file has only one."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Names of the columns where they differ from the standard ones, e.g. {messages: conversation}."""

    ignore: tuple[str, ...] = ()
    """Keys of messages, and columns, that are passed over, e.g. [id, timestamp]. Reward functions get columns all the
    same."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the examples drawn, relative to the other sources; by default the number of its records."""

    @field_validator("ignore")
    @classmethod
    def _messages_stay(cls, ignore: tuple[str, ...]) -> tuple[str, ...]:
        needed = [name for name in ("role", "content") if name in ignore]
        if needed:
            raise ValueError(
                f"ignore names {' and '.join(needed)}, and a message needs its role and content: leave it out"
            )
        return ignore


class SourcesConfig(Section):
    train: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    """Sources of training examples, mixed by weight."""

    validation: tuple[SourceConfig, ...] = ()
    """Sources of held-out examples."""

    chat_template: PathText | None = None
    """File with a Jinja chat template to use in place of the tokenizer's own."""

    shuffle: bool = True
    """New order in every epoch; false keeps the order of the file."""


class ExamplesConfig(SourcesConfig):
    """Of records that are whole before a run starts."""

    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to an example longer than a microbatch or the model's context: cut at the end, or left out. Both are
    counted in the metrics."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes that tokenise ahead of training, on each rank."""


class DataConfig(ExamplesConfig):
    train_on: Literal["all", "last"] = "all"
    """Assistant turns that count in the loss: all of them, or only the last; in either case none of weight 0."""


class PromptDataConfig(SourcesConfig):
    """Records with `prompt` (a text or messages) and what the rewards need, `answer` for most that are built in."""


class CommonBatchConfig(Section):
    """What the batches of all algorithms have."""

    microbatch_tokens: Annotated[int, Field(gt=0, lt=2**31)]
    """Capacity of a microbatch, the microbatch; never padded up to it. It must hold one sequence, of pairs both."""


class BatchConfig(CommonBatchConfig):
    sequences: BatchSize
    """Sequences of one step over all data ranks (the global batch)."""


class PairBatchConfig(CommonBatchConfig):
    pairs: BatchSize
    """Pairs of one step over all data ranks (the global batch)."""


class PolicyBatchConfig(CommonBatchConfig):
    optimizer_steps: Positive = 1
    """Optimizer steps for one batch of rollouts, each over its share of the prompts."""
