"""Data sources, and how examples become token sequences and microbatches."""

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
    """JSON lines, a JSON array, parquet, CSV, TSV or Arrow, optionally compressed (.gz, .zst, .bz2, .xz); a glob
    pattern of such files, e.g. data/*.parquet; or a dataset: its folder, a folder from `save_to_disk`, or its hub
    id."""

    split: str = "train"
    """Split of a dataset. Ignored for files, which have no splits."""

    subset: str | None = None
    """Subset (also called configuration) of a dataset that has several, e.g. main."""

    columns: dict[Column, str | tuple[str, ...]] = Field(default_factory=dict)
    """Names of columns that differ from the standard names, e.g. {messages: conversation}. A dotted name is a key
    inside a column: {answer: reward_model.ground_truth}. Several names are joined into one text, one line each:
    {prompt: [instruction, input], completion: output}."""

    system: str | None = None
    """System message for records that do not start with one. For a column of system messages, use columns: {system:
    NAME}."""

    ignore: tuple[str, ...] = ()
    """Columns and message keys to ignore, e.g. [id, timestamp]. Reward functions still get these columns."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Sampling weight of this source, relative to the sum over all sources. Defaults to its number of records."""

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
                f"ignore names {' and '.join(needed)}, but a message needs its role and content: remove it"
            )
        return ignore


class SourcesConfig(Section):
    train: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    """Training sources. Examples are drawn from all of them in proportion to their weights."""

    validation: tuple[SourceConfig, ...] = ()
    """Sources of held-out examples."""

    chat_template: PathText | None = None
    """File with a Jinja chat template that replaces the tokenizer's own."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking: false}, used for data, rollouts and validation."""

    min_pixels: Positive | None = None
    """Minimum pixels of an image, for models that take images of any size: smaller images are enlarged. Defaults to the
    checkpoint's image processor. Applies equally to training, generators and validation."""

    max_pixels: Positive | None = None
    """Maximum pixels of an image, which bounds its number of tokens: larger images are shrunk. Defaults to the
    checkpoint's image processor."""

    shuffle: bool = True
    """Draw examples in a new random order every epoch. false: in the order of the files."""

    on_bad_record: Literal["stop", "drop"] = "stop"
    """Handling of a record that is rejected for its form, its characters, its files, or content that the chat template
    drops. stop: the run ends, before its first step if reading the record reveals the problem. drop: the record is
    skipped, the console shows the first one, and `data/num_bad_records` counts them. A line that is not JSON always
    ends the run."""

    @model_validator(mode="after")
    def _has_room(self) -> "SourcesConfig":
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels} is greater than max_pixels={self.max_pixels}: no image fits both"
            )
        return self


class ExamplesConfig(SourcesConfig):
    """Data whose records already contain the completions to train on."""

    max_tokens: Positive | None = None
    """Maximum tokens per sequence. Defaults to the limit set by the model's context and the microbatch."""

    overlong: Literal["truncate", "drop"] = "truncate"
    """Handling of an example longer than `max_tokens`, a microbatch or the model's context. truncate: cut off its end.
    drop: skip it. The metrics count both."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Number of processes that tokenise ahead of training, next to rank 0. null: one per data rank, at most 8; none if
    there is a single data rank."""


class RankedDataConfig(ExamplesConfig):
    """Pairs of completions for a reward model, which scores the last token of each."""

    overlong: Literal["drop"] = "drop"
    """Pairs longer than `max_tokens`, a microbatch or the model's context are dropped, since a truncated completion
    would be scored at the wrong end. The metrics count them."""


class LabelledDataConfig(ExamplesConfig):
    """Completions labelled good or bad."""

    train_on: Literal["all", "last"] = "last"
    """Assistant turns that a record's label applies to: only the last, or all after the prompt. Turns with weight 0 are
    always excluded."""


class DataConfig(ExamplesConfig):
    train_on: Literal["all", "last"] = "all"
    """Assistant turns that count in the loss: all turns of a chat, or only the last. Turns with weight 0 never
    count."""

    turns: Literal["together", "split"] = "together"
    """together: one example per chat. split: one example per trained turn, with the turns before it. Use split for
    templates that render a turn differently once others follow, such as those that remove earlier thinking: each turn
    is then trained exactly as the model generates it."""

    @model_validator(mode="after")
    def _one_choice(self) -> "DataConfig":
        if self.turns == "split" and self.train_on == "last":
            raise ValueError("turns=split trains every turn, in its own example, but train_on=last only the last")
        return self


class PromptDataConfig(SourcesConfig):
    """Data whose records hold a `prompt` (a text or messages) and what the rewards need, for most built-in ones an
    `answer`."""


class CommonBatchConfig(Section):
    """The keys of `batch` that all algorithms share."""

    microbatch_tokens: Literal["auto"] | Annotated[int, Field(gt=0, lt=2**31)] = "auto"
    """Maximum tokens of a microbatch, which is never padded. Must hold the longest sequence (for dpo, both sequences of
    a pair); `overlong` decides about longer ones. auto: as many as fit into GPU memory according to `plan`, at most
    8,192 in a pipeline or on a CPU; the console and metrics.jsonl show the value. Set a number if the same examples
    must be truncated on every GPU."""

    min_microbatches: Positive = 1
    """Minimum number of microbatches per data rank and optimizer step. Never less than the number of pipeline
    stages."""

    microbatches_multiple: Positive = 1
    """The number of microbatches per data rank and optimizer step is a multiple of this."""

    @property
    def capacity(self) -> int:
        """`microbatch_tokens` as a number. Must not be read while it is still "auto"."""
        assert self.microbatch_tokens != "auto"  # resolved before data are read
        return self.microbatch_tokens


class BatchConfig(CommonBatchConfig):
    sequences: BatchSize
    """Global batch size: sequences per optimizer step, over all data ranks."""


class PairBatchConfig(CommonBatchConfig):
    pairs: BatchSize
    """Global batch size: pairs per optimizer step, over all data ranks."""


class PolicyBatchConfig(CommonBatchConfig):
    optimizer_steps: Positive = 1
    """Number of optimizer steps per batch of rollouts. Each trains on an equal share of the prompts."""

    epochs: Positive = 1
    """Number of passes over each batch of rollouts, with optimizer_steps each. Every pass reassigns the prompts to
    optimizer steps at random. Old log-probabilities stay those from before the first pass."""

    @property
    def steps_of_all_epochs(self) -> int:
        """Optimizer steps per batch of rollouts, over all passes."""
        return self.optimizer_steps * self.epochs
