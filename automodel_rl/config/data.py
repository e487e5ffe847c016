"""Sources of examples, and how examples become token sequences and microbatches."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from automodel_rl.config.base import BatchSize, PathText, Positive, Section

Column = Literal[
    "messages",
    "images",
    "videos",
    "audio",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "margin",
    "label",
    "answer",
    "tools",
    "system",
]


class SourceConfig(Section):
    path: PathText
    """A file of JSON lines, a JSON array, parquet, CSV, TSV or Arrow, also compressed (.gz, .zst, .bz2, .xz); a pattern
    of such files, e.g. data/*.parquet; or a dataset: its folder, a folder from `save_to_disk`, or its hub id."""

    split: str = "train"
    """Split of a dataset. Files have no splits."""

    subset: str | None = None
    """Subset of a dataset that has several, also called its configuration, e.g. main."""

    columns: dict[Column, str | tuple[str, ...]] = Field(default_factory=dict)
    """Names of columns that differ from the standard names, e.g. {messages: conversation}. A name with dots is a key
    inside of a column: {answer: reward_model.ground_truth}. Several names make one text, a line for each: {prompt:
    [instruction, input], completion: output}."""

    system: str | None = None
    """System message for records that begin without one. A column of system messages is named in columns: {system:
    NAME}."""

    ignore: tuple[str, ...] = ()
    """Columns, and keys of messages, that are not used, e.g. [id, timestamp]. Reward functions still get these
    columns."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Weight of this source. Its share of the examples drawn is its weight divided by the sum of all sources' weights.
    By default the weight is the number of its records."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, values: Any) -> Any:
        return {"path": values} if isinstance(values, str) else values

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

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, e.g. {enable_thinking: false}, in data, rollouts and validation."""

    min_pixels: Positive | None = None
    """Fewest pixels of an image, for models that take images of any size: smaller ones are enlarged. By default what
    the checkpoint's image processor says. Training, generators and validation see the same images."""

    max_pixels: Positive | None = None
    """Most pixels of an image, which decide how many tokens it has: larger ones are made smaller."""

    shuffle: bool = True
    """Draw examples in a new random order in every epoch. false keeps the order of the files."""

    on_bad_record: Literal["stop", "drop"] = "stop"
    """What happens to a record that is refused, because of its form, its characters, its files or what the chat
    template leaves out of it. stop: the run ends, before its first step where reading the record shows it. drop: the
    record is left out. The console names the first one, and `data/num_bad_records` counts them. A line that is no JSON
    ends the run in both cases."""

    @model_validator(mode="after")
    def _has_room(self) -> "SourcesConfig":
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels} is more than max_pixels={self.max_pixels}: no image has so many"
            )
        return self


class ExamplesConfig(SourcesConfig):
    """Data whose records already hold the completions to train on."""

    max_tokens: Positive | None = None
    """Most tokens of a sequence. By default the model's context and a microbatch are the only limits."""

    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to an example that is longer than `max_tokens`, a microbatch or the model's context. truncate: its
    end is cut off. drop: it is left out. The metrics count both."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Number of processes that tokenise examples ahead of training, beside rank 0. null: one for each data rank, up to
    8, and none where there is one data rank."""


class RankedDataConfig(ExamplesConfig):
    """Pairs of completions for a reward model, which reads the end of each."""

    overlong: Literal["drop"] = "drop"
    """A pair that is longer than `max_tokens`, a microbatch or the model's context is left out, for a completion that
    is cut has another end. The metrics count them."""


class JudgedDataConfig(ExamplesConfig):
    """Completions that are called good or bad."""

    train_on: Literal["all", "last"] = "last"
    """Assistant turns that a record's label judges: only the last, or all after the prompt. A turn with weight 0 is
    never judged."""


class DataConfig(ExamplesConfig):
    train_on: Literal["all", "last"] = "all"
    """Assistant turns that count in the loss: all turns of a chat, or only the last. A turn with weight 0 never
    counts."""

    turns: Literal["together", "split"] = "together"
    """together: a chat is one example. split: a chat is one example for each trained turn, with what comes before it.
    That is for templates that write a turn differently once others follow, such as those that leave out earlier
    thoughts: each turn is trained as the model writes it."""

    @model_validator(mode="after")
    def _one_choice(self) -> "DataConfig":
        if self.turns == "split" and self.train_on == "last":
            raise ValueError("turns=split trains every turn, in an example of its own, and train_on=last only the last")
        return self


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

    min_microbatches: Positive = 1
    """Fewest microbatches of each data rank in an optimizer step. There are never fewer than pipeline stages."""

    microbatches_multiple: Positive = 1
    """The number of microbatches of each data rank in an optimizer step is a multiple of this."""

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

    epochs: Positive = 1
    """Passes over each batch of rollouts, with optimizer_steps in each. Every pass deals the prompts to the optimizer
    steps anew. Old log-probabilities stay those from before the first."""

    @property
    def steps_of_all_epochs(self) -> int:
        """Number of optimizer steps for one batch of rollouts, over all passes."""
        return self.optimizer_steps * self.epochs
