"""Human-readable examples, with trained text marked."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence
from automodel_rl.config import RunConfig
from automodel_rl.config.data import CommonBatchConfig, ExamplesConfig
from automodel_rl.data.chat import ChatTokenizer, open_chat_tokenizer
from automodel_rl.data.examples import DATASETS
from automodel_rl.data.media import cut
from automodel_rl.data.records import READERS, chats_of
from automodel_rl.data.turn_split import open_examples
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel

BEGIN, END, CUT = "⟦", "⟧", "✂"
"""Markers around trained text, and before truncated text."""

UNLIMITED = CommonBatchConfig(microbatch_tokens=2**31 - 1)
"""Stand-in for `batch` if the microbatch size is decided only when the run starts."""

MAX_REPEATS = 32
"""Maximum repetitions of a token that are written out."""


@dataclass(frozen=True)
class ShownExample:
    """A sequence of a run's data.

    Attributes:
        where: location in the data.
        num_tokens: length in tokens.
        stretches: text in order, in pieces that are each trained or not.
        cut: text at the end that the run truncates.
        note: why the record is too long or rejected and how the run handles it; otherwise empty.

    Example:
        >>> print(ShownExample("chats.jsonl:1", 4, (("2+2? ", False), ("4", True))))
        --- chats.jsonl:1: 4 tokens, between ⟦ and ⟧
        2+2? ⟦4⟧
    """

    where: str
    num_tokens: int
    stretches: tuple[tuple[str, bool], ...]
    cut: str = ""
    note: str = ""

    def __str__(self) -> str:
        trained = sum(is_trained for _, is_trained in self.stretches)
        text = "".join(f"{BEGIN}{text}{END}" if is_trained else text for text, is_trained in self.stretches)
        pieces = f"{trained} trained pieces between {BEGIN} and {END}" if trained != 1 else f"between {BEGIN} and {END}"
        head = f"--- {self.where}: {self.num_tokens} tokens, {pieces if trained else 'none trained'}"
        note = f"\n{self.note}" if self.note else ""
        return f"{head}{note}\n{text}{CUT if self.cut else ''}{self.cut}"


def stretches_of(tokenizer: PreTrainedTokenizerBase, sequence: TokenSequence) -> tuple[tuple[str, bool], ...]:
    """Returns a sequence's text, special tokens included, in pieces that are trained or not. A token repeated many
    times in a row, such as an image placeholder, is written once with its count."""
    both = zip(sequence.input_ids.tolist(), sequence.loss_mask.tolist(), strict=True)
    return tuple(
        (_text_of(tokenizer, [token for token, _ in group]), bool(is_trained))
        for is_trained, group in itertools.groupby(both, key=lambda pair: pair[1])
    )


def _text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decodes tokens. Writes a token repeated many times in a row once, with its count."""
    if not ids:
        return ""
    repeats = [[*group] for _, group in itertools.groupby(ids)]
    if max(map(len, repeats)) <= MAX_REPEATS:
        return str(tokenizer.decode(ids))
    texts = []
    for is_long, groups in itertools.groupby(repeats, key=lambda group: len(group) > MAX_REPEATS):
        if is_long:
            texts += [f"{tokenizer.decode(group[:1])}(x {len(group):,})" for group in groups]
        else:
            texts.append(str(tokenizer.decode([*itertools.chain.from_iterable(groups)])))
    return "".join(texts)


def first_examples(config: RunConfig, count: int) -> list[ShownExample]:
    """Returns the sequences of the first `count` records of a run's training data, in the order of the files. Marks
    what would be truncated or dropped due to `data.max_tokens`, the model's context, or a fixed
    `batch.microbatch_tokens` in `config`.

    Raises:
        InputError: a record is malformed, or the chat template cannot render it.

    Example:
        >>> examples = first_examples(load_config("my_sft.yaml", algorithm="sft"), 3)
        >>> len(examples)
        3
    """
    model = OpenedModel.open(config.model)
    return examples_of(config, count, open_chat_tokenizer(config, model), model.description.context)


def examples_of(config: RunConfig, count: int, chat: ChatTokenizer, context: int | None) -> list[ShownExample]:
    """Like `first_examples`, with an open chat tokenizer and a model with the given maximum context."""
    sequences = _openings(config, chat) if config.record_type == "prompts" else _sequences(config, chat, context)
    return [example for examples in itertools.islice(sequences, count) for example in examples]


def _openings(config: RunConfig, chat: ChatTokenizer) -> Iterator[list[ShownExample]]:
    """Yields the prompts of each record."""
    for source_config in config.data.train:
        source = open_examples(source_config, config.data)
        for number, record in enumerate(source):
            where = source.where(number)
            chats = chats_of(READERS[config.record_type](record, source_config, where), where)
            yield [_shown(chat.tokenizer, place, chat.generation_prompt(one, place)) for one, place in chats]


def _sequences(config: RunConfig, chat: ChatTokenizer, context: int | None) -> Iterator[list[ShownExample]]:
    """Yields the sequences of each record, as the run builds them."""
    assert isinstance(config.data, ExamplesConfig)
    batch = UNLIMITED if config.batch.microbatch_tokens == "auto" else config.batch
    dataset = DATASETS[config.record_type](config.data.train, chat, batch, context, config.data)
    names = (", chosen", ", rejected") if dataset.sequences_per_example == 2 else ("",)
    for source, size in enumerate(dataset.sources.sizes):
        for number in range(size):
            try:
                whole, where = dataset.whole((source, number))
            except InputError as error:
                if config.data.on_bad_record == "stop":
                    raise
                *_, where = dataset.sources.find((source, number))
                yield [ShownExample(where, 0, (), note=f"{error}: dropped")]
                continue
            example = dataset.fit((source, number), whole, where)
            kept = [len(sequence) for sequence in example.sequences] or [0] * len(whole)
            of_sequences = zip(names, whole, kept, strict=True)
            yield [_shown(chat.tokenizer, where + name, one, num, example.too_long) for name, one, num in of_sequences]


def _shown(
    tokenizer: PreTrainedTokenizerBase, where: str, whole: TokenSequence, kept: int | None = None, note: str = ""
) -> ShownExample:
    """Formats a sequence of which the run keeps `kept` tokens; 0 if its record is dropped, None for all."""
    if kept == 0:
        whole = replace(whole, loss_mask=torch.zeros_like(whole.loss_mask))
    kept = kept or len(whole)
    tail = _text_of(tokenizer, whole.input_ids[kept:].tolist())
    return ShownExample(where, len(whole), stretches_of(tokenizer, cut(whole, kept)), tail, note)
