"""Tokenised examples: one sequence per chat, two per pair of completions."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, get_worker_info

from automodel_rl.batch import TokenSequence
from automodel_rl.config import SourceConfig
from automodel_rl.config.data import CommonBatchConfig, ExamplesConfig
from automodel_rl.config.run import Records
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.media import cut
from automodel_rl.data.messages import Chat
from automodel_rl.data.records import (
    LabelledCompletion,
    Pair,
    Reader,
    Text,
    chats_of,
    read_chat,
    read_labelled,
    read_pair,
    read_ranked_pair,
)
from automodel_rl.data.sampler import Draw
from automodel_rl.data.sources import Sources
from automodel_rl.data.turn_split import open_examples
from automodel_rl.errors import InputError

MAX_KEPT_TOKENS = 2**22
"""Maximum tokens of examples cached for the next epoch, counting `EXAMPLE_TOKENS` more per example: about 50 MB."""

EXAMPLE_TOKENS = 128
"""Memory of an example's Python objects, in tokens."""


@dataclass(frozen=True)
class Example:
    """A tokenised record.

    Attributes:
        draw: source index and record index.
        sequences: token sequences; empty if the record was dropped.
        too_long: message about its excess length and how it was handled; empty if it fits.
        refused: reason for which the record was rejected and dropped; empty if it was not.
    """

    draw: Draw
    sequences: tuple[TokenSequence, ...]
    too_long: str = ""
    refused: str = ""

    @property
    def is_truncated(self) -> bool:
        return bool(self.sequences and self.too_long)


def checked(example: Example | InputError) -> Example:
    """Returns an example, or raises the error that a worker process returned in its place."""
    if isinstance(example, InputError):
        raise example
    return example


class ExampleDataset(Dataset):
    """Records of several sources as examples. Picklable.

    Args:
        sources: configs of the sources.
        chat: tokenises chats.
        batch: section with the microbatch capacity, into which all sequences of an example must fit together.
        context: the model's maximum tokens; None for no limit.
        data: section with a further limit and the handling of long examples.

    Attributes:
        longest: maximum tokens of a sequence.
        limit: name of the setting that determines it.
    """

    sequences_per_example = 1
    """Number of sequences per example."""

    read: Reader
    """Reader of a record."""

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        chat: ChatTokenizer,
        batch: CommonBatchConfig,
        context: int | None,
        data: ExamplesConfig,
    ):
        self.chat, self.batch, self.data = chat, batch, data
        limits = {"batch.microbatch_tokens": batch.capacity, "the model's context": context}
        limits["data.max_tokens"] = data.max_tokens
        self.longest, self.limit = min((limit, name) for name, limit in limits.items() if limit is not None)
        self.sources = Sources(sources, functools.partial(open_examples, data=data))
        self._kept: dict[Draw, Example] = {}
        self._room = MAX_KEPT_TOKENS

    def _held(self, draw: Draw) -> tuple[Chat | Text | Pair | LabelledCompletion, str]:
        """Returns the content of a record and its location in the data."""
        record, config, where = self.sources.find(draw)
        return type(self).read(record, config, where), where

    def __getitem__(self, draw: Draw) -> Example | InputError:
        """Returns the example of a draw, cached if possible. Returns an InputError rather than raising it, since a
        worker process would wrap it in a traceback; with `on_bad_record: drop`, returns an empty example that states
        it."""
        if draw in self._kept:
            return self._kept[draw]
        try:
            example = self.fit(draw, *self.whole(draw))
        except InputError as error:
            return Example(draw, (), refused=str(error)) if self.data.on_bad_record == "drop" else error
        self._keep(draw, example)
        return example

    def _keep(self, draw: Draw, example: Example) -> None:
        """Caches an example for the next epoch if there is room. Worker processes do not cache: the tensors they send
        move to shared memory, and each would keep a file open."""
        size = EXAMPLE_TOKENS + sum(map(len, example.sequences))
        has_media = any(sequence.media for sequence in example.sequences)
        if size <= self._room and not has_media and get_worker_info() is None:
            self._kept[draw] = example
            self._room -= size

    def whole(self, draw: Draw) -> tuple[tuple[TokenSequence, ...], str]:
        """Returns a record's untruncated token sequences, and its location."""
        held, where = self._held(draw)
        if isinstance(held, Text):
            return (self.chat.text_sequence(held.text),), where
        return self.sequences(held, where), where

    def check_fit(self) -> None:
        """Raises InputError if no record yields a trained token."""
        sizes = enumerate(self.sources.sizes)
        draws = [(source, number) for source, size in sizes for number in range(size)]
        refused = ""
        for example in (checked(self[draw]) for draw in draws):
            if example.sequences:
                return
            refused = refused or example.refused
        if refused:
            raise InputError(f"{refused}; and no other record can be trained")
        raise InputError(
            f"none of the {len(draws)} records has a trained token within the {self.longest} tokens that "
            "data.max_tokens, batch.microbatch_tokens and the model's context allow, so all were dropped: raise the "
            "lowest of them, or use shorter examples"
        )

    def sequences(self, held: Chat | Pair | LabelledCompletion, where: str) -> tuple[TokenSequence, ...]:
        """Tokenises a chat, a pair, or a completion with its label."""
        return tuple(self.chat(chat, place) for chat, place in chats_of(held, where))

    def prompt(self, draw: Draw) -> tuple[TokenSequence, str] | None:
        """Returns the tokens before the assistant's last turn in a record's first chat, and that turn's content; None
        for a plain text."""
        held, where = self._held(draw)
        if isinstance(held, Text):
            return None
        chat, where = chats_of(held, where)[0]
        return self.chat.prompt_sequence(chat, where), str(chat.messages[chat.turns[-1]].get("content"))

    def fit(self, draw: Draw, sequences: tuple[TokenSequence, ...], where: str) -> Example:
        """Truncates the longest sequences until all fit into a microbatch together, or drops the example. `sequences`
        and `where` are the results of `whole`."""
        lengths = [len(sequence) for sequence in sequences]
        if sum(lengths) <= self.batch.capacity and max(lengths) <= self.longest:
            return Example(draw, sequences)
        limit = min(_common_limit(lengths, self.batch.capacity), self.longest)
        name = self.limit if limit == self.longest else "batch.microbatch_tokens, for both together"
        said = (
            f"{where} has {' and '.join(f'{length:,}' for length in lengths)} tokens, but only {limit:,} fit ({name})"
        )
        if self.data.overlong == "drop":
            return Example(draw, (), f"{said}: dropped")
        shorter = tuple(cut(sequence, limit) for sequence in sequences)
        if not all(sequence.loss_mask[1:].any() for sequence in shorter):
            return Example(draw, (), f"{said}: dropped, because no trained token would be left")
        return Example(draw, shorter, f"{said}: cut at its end")


class ChatDataset(ExampleDataset):
    """Chats, one sequence each."""

    read = staticmethod(read_chat)


class PairDataset(ExampleDataset):
    """Preference pairs, two sequences each: the prompt with the chosen and with the rejected completion."""

    sequences_per_example = 2
    read = staticmethod(read_pair)


class RankedPairDataset(PairDataset):
    """Preference pairs for a reward model. Every token of both sequences has the pair's margin as the value
    `margin`."""

    read = staticmethod(read_ranked_pair)

    def sequences(self, held: Chat | Pair | LabelledCompletion, where: str) -> tuple[TokenSequence, ...]:
        """Tokenises a pair and attaches its margin."""
        assert isinstance(held, Pair)
        return tuple(
            dataclasses.replace(sequence, values={"margin": torch.full((len(sequence),), held.margin)})
            for sequence in super().sequences(held, where)
        )


class LabelledDataset(ExampleDataset):
    """Completions labelled good or bad. Every token has the label, 1 or 0, as the value `label`."""

    read = staticmethod(read_labelled)

    def sequences(self, held: Chat | Pair | LabelledCompletion, where: str) -> tuple[TokenSequence, ...]:
        """Tokenises a completion and attaches its label."""
        assert isinstance(held, LabelledCompletion)
        return tuple(
            dataclasses.replace(sequence, values={"label": torch.full((len(sequence),), float(held.is_good))})
            for sequence in super().sequences(held, where)
        )


DATASETS: dict[Records, type[ExampleDataset]] = {
    "chats": ChatDataset,
    "pairs": PairDataset,
    "ranked pairs": RankedPairDataset,
    "judged": LabelledDataset,
}
"""Dataset class for each type of records that contain completions."""


def _common_limit(lengths: list[int], capacity: int) -> int:
    """Returns the largest length to which sequences can be truncated so that together they fit into `capacity`."""
    left = capacity
    for done, length in enumerate(sorted(lengths)):
        limit = left // (len(lengths) - done)
        if length >= limit:
            return limit
        left -= length
    return capacity
