"""Examples: records as token sequences. A chat makes one sequence, a pair of completions two."""

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
    Judged,
    Pair,
    Reader,
    Text,
    chats_of,
    read_chat,
    read_judged,
    read_pair,
    read_ranked_pair,
)
from automodel_rl.data.sampler import Draw
from automodel_rl.data.sources import Sources
from automodel_rl.data.turn_split import open_examples
from automodel_rl.errors import InputError

MOST_KEPT_TOKENS = 2**22
"""Most tokens of the examples that are kept for the next epoch, each with `EXAMPLE_TOKENS` more: about 50 MB."""

EXAMPLE_TOKENS = 128
"""Tokens that take as much memory as the objects of an example."""


@dataclass(frozen=True)
class Example:
    """A tokenised record.

    Attributes:
        draw: the record's source and number.
        sequences: its token sequences; empty if none of it can be trained on.
        too_long: what was too long and what became of it; empty if all fits.
        refused: why the record is refused and left out; empty if it is not.
    """

    draw: Draw
    sequences: tuple[TokenSequence, ...]
    too_long: str = ""
    refused: str = ""

    @property
    def is_truncated(self) -> bool:
        return bool(self.sequences and self.too_long)


def checked(example: Example | InputError) -> Example:
    """The example that a worker process made. If the worker returned an error, it is raised here."""
    if isinstance(example, InputError):
        raise example
    return example


class ExampleDataset(Dataset):
    """Records of several sources as examples. It can be pickled, so that worker processes can use it.

    Args:
        sources: configs of the sources of the records.
        chat: makes token sequences of chats.
        batch: the config section that says how many tokens a microbatch holds, which an example must fit into.
        context: most tokens of a sequence, a limit of the model; None for no limit.
        data: the config section with another limit, and with what happens to an example that is too long.

    Attributes:
        longest: most tokens of a sequence.
        limit: the name of what limits them.
    """

    together = 1
    """Number of sequences of an example."""

    read: Reader
    """The function that reads a record."""

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
        self._room = MOST_KEPT_TOKENS

    def _held(self, draw: Draw) -> tuple[Chat | Text | Pair | Judged, str]:
        """What a record holds, and its place in the data."""
        record, config, where = self.sources.find(draw)
        return type(self).read(record, config, where), where

    def __getitem__(self, draw: Draw) -> Example | InputError:
        """The example of a draw, from memory if it was made before. An InputError is returned, not raised: a worker
        process would wrap it in its traceback. With `on_bad_record: drop` the example is empty and tells it."""
        if draw in self._kept:
            return self._kept[draw]
        try:
            example = self.fit(draw, *self.whole(draw))
        except InputError as error:
            return Example(draw, (), refused=str(error)) if self.data.on_bad_record == "drop" else error
        self._keep(draw, example)
        return example

    def _keep(self, draw: Draw, example: Example) -> None:
        """Keeps an example for the next epoch, if there is room. A worker process keeps none: what it sends moves to
        shared memory, with an open file for each tensor as long as that lives."""
        size = EXAMPLE_TOKENS + sum(map(len, example.sequences))
        has_media = any(sequence.media for sequence in example.sequences)
        if size <= self._room and not has_media and get_worker_info() is None:
            self._kept[draw] = example
            self._room -= size

    def whole(self, draw: Draw) -> tuple[tuple[TokenSequence, ...], str]:
        """A record's token sequences before any is cut, and its place in the data.

        Raises:
            InputError: the record is wrong, or the chat template refuses a chat.
        """
        held, where = self._held(draw)
        if isinstance(held, Text):
            return (self.chat.text_sequence(held.text),), where
        return self.sequences(held, where), where

    def check_fit(self) -> None:
        """Raises InputError if nothing of any record can be trained."""
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
            "least of them, or use shorter examples"
        )

    def sequences(self, held: Chat | Pair | Judged, where: str) -> tuple[TokenSequence, ...]:
        """The token sequences of what a record holds.

        Args:
            held: a chat, a pair, or a completion with its label.
            where: the record's place in the data, for error messages.

        Raises:
            InputError: the chat template refuses a chat.
        """
        return tuple(self.chat(chat, place) for chat, place in chats_of(held, where))

    def prompt(self, draw: Draw) -> tuple[TokenSequence, str] | None:
        """The tokens before the assistant's last turn of a record's first chat, and the content of that turn in the
        data; None for a text, which has no turns."""
        held, where = self._held(draw)
        if isinstance(held, Text):
            return None
        chat, where = chats_of(held, where)[0]
        return self.chat.prompt_sequence(chat, where), str(chat.messages[chat.turns[-1]].get("content"))

    def fit(self, draw: Draw, sequences: tuple[TokenSequence, ...], where: str) -> Example:
        """Cuts the longest sequences until all fit into a microbatch together, or drops the example.

        Args:
            draw: the record's source and number.
            sequences, where: what `whole` returned.
        """
        lengths = [len(sequence) for sequence in sequences]
        if sum(lengths) <= self.batch.capacity and max(lengths) <= self.longest:
            return Example(draw, sequences)
        limit = min(_common_limit(lengths, self.batch.capacity), self.longest)
        name = self.limit if limit == self.longest else "batch.microbatch_tokens, for both together"
        said = f"{where} has {' and '.join(f'{length:,}' for length in lengths)} tokens, and {limit:,} fit ({name})"
        if self.data.overlong == "drop":
            return Example(draw, (), f"{said}: dropped")
        shorter = tuple(cut(sequence, limit) for sequence in sequences)
        if not all(sequence.loss_mask[1:].any() for sequence in shorter):
            return Example(draw, (), f"{said}: dropped, because no trained token would be left")
        return Example(draw, shorter, f"{said}: cut at its end")


class ChatDataset(ExampleDataset):
    """Chats, each one sequence."""

    read = staticmethod(read_chat)


class PairDataset(ExampleDataset):
    """Preference pairs, each two sequences: the prompt with the chosen completion, and with the rejected one."""

    together = 2
    read = staticmethod(read_pair)


class RankedPairDataset(PairDataset):
    """Preference pairs for a reward model: each row has its pair's margin as the value `margin` of every token."""

    read = staticmethod(read_ranked_pair)

    def sequences(self, held: Chat | Pair | Judged, where: str) -> tuple[TokenSequence, ...]:
        """The two token sequences of a pair, with its margin. The arguments are those of `ExampleDataset.sequences`."""
        assert isinstance(held, Pair)
        return tuple(
            dataclasses.replace(sequence, values={"margin": torch.full((len(sequence),), held.margin)})
            for sequence in super().sequences(held, where)
        )


class JudgedDataset(ExampleDataset):
    """Completions that are called good or bad: each row has 1 or 0 as the value `label` of every token."""

    read = staticmethod(read_judged)

    def sequences(self, held: Chat | Pair | Judged, where: str) -> tuple[TokenSequence, ...]:
        """The token sequence of a completion, with its label. The arguments are those of `ExampleDataset.sequences`."""
        assert isinstance(held, Judged)
        return tuple(
            dataclasses.replace(sequence, values={"label": torch.full((len(sequence),), float(held.is_good))})
            for sequence in super().sequences(held, where)
        )


DATASETS: dict[Records, type[ExampleDataset]] = {
    "chats": ChatDataset,
    "pairs": PairDataset,
    "ranked pairs": RankedPairDataset,
    "judged": JudgedDataset,
}
"""How records that hold their completions become examples, by what they hold."""


def _common_limit(lengths: list[int], capacity: int) -> int:
    """The largest limit for all sequences such that, when longer ones are cut to it, all fit into `capacity`
    together."""
    left = capacity
    for done, length in enumerate(sorted(lengths)):
        limit = left // (len(lengths) - done)
        if length >= limit:
            return limit
        left -= length
    return capacity
