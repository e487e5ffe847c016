"""Examples as people read them: their text, with marks around what is trained."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence
from automodel_rl.config import RunConfig
from automodel_rl.data.chat import ChatTokenizer, open_chat_tokenizer
from automodel_rl.data.records import READERS, Text, chats_of
from automodel_rl.data.turn_split import open_examples
from automodel_rl.hf.opened_model import OpenedModel

BEGIN, END = "⟦", "⟧"
"""Marks around trained tokens."""

MOST_REPEATS = 32
"""Most times that a token is written in a row."""


@dataclass(frozen=True)
class ShownExample:
    """A sequence of a run's data.

    Attributes:
        where: its place in the data.
        num_tokens: its length in tokens.
        stretches: its text in order, in pieces that are trained or not.

    Example:
        >>> print(ShownExample("chats.jsonl:1", 4, (("2+2? ", False), ("4", True))))
        --- chats.jsonl:1: 4 tokens, between ⟦ and ⟧
        2+2? ⟦4⟧
    """

    where: str
    num_tokens: int
    stretches: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        trained = sum(is_trained for _, is_trained in self.stretches)
        text = "".join(f"{BEGIN}{text}{END}" if is_trained else text for text, is_trained in self.stretches)
        pieces = f"{trained} trained pieces between {BEGIN} and {END}" if trained != 1 else f"between {BEGIN} and {END}"
        return f"--- {self.where}: {self.num_tokens} tokens, {pieces if trained else 'none trained'}\n{text}"


def stretches_of(tokenizer: PreTrainedTokenizerBase, sequence: TokenSequence) -> tuple[tuple[str, bool], ...]:
    """A sequence's text, special tokens included, in pieces that are trained or not. A token that is there very often
    in a row, as in the place of an image, is written once with its number.

    Args:
        tokenizer: the model's tokenizer.
        sequence: token ids and loss mask, each [T].
    """
    both = zip(sequence.input_ids.tolist(), sequence.loss_mask.tolist(), strict=True)
    return tuple(
        (_text_of(tokenizer, [token for token, _ in group]), bool(is_trained))
        for is_trained, group in itertools.groupby(both, key=lambda pair: pair[1])
    )


def _text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    repeats = [[*group] for _, group in itertools.groupby(ids)]
    if max(map(len, repeats)) <= MOST_REPEATS:
        return str(tokenizer.decode(ids))
    texts = []
    for is_long, groups in itertools.groupby(repeats, key=lambda group: len(group) > MOST_REPEATS):
        if is_long:
            texts += [f"{tokenizer.decode(group[:1])}(x {len(group):,})" for group in groups]
        else:
            texts.append(str(tokenizer.decode([*itertools.chain.from_iterable(groups)])))
    return "".join(texts)


def first_examples(config: RunConfig, count: int) -> list[ShownExample]:
    """The first sequences of a run's training data, in the order of the files, before any is cut.

    Args:
        config: the run's config.
        count: number of records.

    Raises:
        InputError: a record is wrong, or the chat template cannot write it.

    Example:
        >>> examples = first_examples(load_config("my_sft.yaml", algorithm="sft"), 3)
        >>> len(examples)
        3
    """
    return examples_of(config, count, open_chat_tokenizer(config, OpenedModel.open(config.model)))


def examples_of(config: RunConfig, count: int, chat: ChatTokenizer) -> list[ShownExample]:
    """`first_examples` by an open chat tokenizer."""
    records = itertools.islice(_sequences(config, chat), count)
    return [example for examples in records for example in examples]


def _sequences(config: RunConfig, chat: ChatTokenizer) -> Iterator[list[ShownExample]]:
    """The sequences of all records, record by record."""
    read = READERS[config.reads]
    for source_config in config.data.train:
        source = open_examples(source_config, config.data)
        for number, record in enumerate(source):
            where = source.where(number)
            held = read(record, source_config, where)
            if isinstance(held, Text):
                named = [(chat.text_sequence(held.text), where)]
            else:
                write = chat.opening if config.reads == "prompts" else chat
                named = [(write(one, place), place) for one, place in chats_of(held, where)]
            yield [
                ShownExample(place, len(sequence), stretches_of(chat.tokenizer, sequence)) for sequence, place in named
            ]
