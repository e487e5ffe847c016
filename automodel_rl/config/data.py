"""Sources of examples, and how examples become token sequences and microbatches."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from automodel_rl.config.base import BatchSize, PathText, Positive, Section

Column = Literal["messages", "images", "prompt", "chosen", "rejected", "answer", "tools"]


class SourceConfig(Section):
    path: PathText
    """A JSON-lines file, or a dataset that `datasets.load_dataset` opens: its hub id or its folder."""

    split: str = "train"
    """Split of the dataset. JSON-lines files have no splits."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Names of columns that differ from the standard names, e.g. {messages: conversation}."""

    ignore: tuple[str, ...] = ()
    """Columns, and keys of messages, that are not used, e.g. [id, timestamp]. Reward functions still get these
    columns."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Weight of this source. Its share of the examples drawn is its weight divided by the sum of all sources' weights.
    By default the weight is the number of its records."""

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
    """Sources of training examples. Examples are drawn from all of them, in proportion to their weights."""

    validation: tuple[SourceConfig, ...] = ()
    """Sources of held-out examples."""

    chat_template: PathText | None = None
    """File with a Jinja chat template to use in place of the tokenizer's own."""

    shuffle: bool = True
    """Draw examples in a new random order in every epoch. false keeps the order of the files."""


class ExamplesConfig(SourcesConfig):
    """Data whose records already hold the completions to train on."""

    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to an example that is longer than a microbatch or the model's context. truncate: its end is cut off.
    drop: it is left out. The metrics count both."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of processes on each rank that tokenise examples ahead of training."""


class DataConfig(ExamplesConfig):
    train_on: Literal["all", "last"] = "all"
    """Assistant turns that count in the loss: all turns of a chat, or only the last. A turn with weight 0 never
    counts."""


class PromptDataConfig(SourcesConfig):
    """Data whose records hold a `prompt` (a text or messages) and what the rewards need: most built-in ones need
    `answer`."""


class CommonBatchConfig(Section):
    """Keys of `batch` that all algorithms have."""

    microbatch_tokens: Literal["auto"] | Annotated[int, Field(gt=0, lt=2**31)] = "auto"
    """Most tokens of a microbatch, which is never padded. It must hold the longest sequence, for dpo both sequences of
    a pair, and `overlong` says what happens to others. auto: as many as the GPU's memory allows by `plan`, at most
    8,192 in a pipeline and on a CPU; the console and metrics.jsonl say how many. Give a number if the same examples
    shall be cut on every GPU."""

    @property
    def capacity(self) -> int:
        """`microbatch_tokens`, once it is decided."""
        assert self.microbatch_tokens != "auto"  # a run decides it before it reads data
        return self.microbatch_tokens


class BatchConfig(CommonBatchConfig):
    sequences: BatchSize
    """Number of sequences of one optimizer step, over all data ranks: the size of the global batch."""


class PairBatchConfig(CommonBatchConfig):
    pairs: BatchSize
    """Number of pairs of one optimizer step, over all data ranks: the size of the global batch."""


class PolicyBatchConfig(CommonBatchConfig):
    optimizer_steps: Positive = 1
    """Number of optimizer steps for one batch of rollouts. Each step trains on an equal share of the prompts."""
