"""Rollout prompts: an endless stream, identical on every rank and in every run."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.batch import Media
from automodel_rl.config import SourceConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.messages import MEDIA_PARTS, Chat, Message, media_parts
from automodel_rl.data.records import Reader, read_example, read_prompt
from automodel_rl.data.sampler import BatchSampler, Draw, Order
from automodel_rl.data.sources import Sources
from automodel_rl.errors import InputError
from automodel_rl.media.videos import Frames


@dataclass(frozen=True)
class Prompt:
    """A prompt of the stream.

    Attributes:
        token_ids: token ids, including the header of the assistant's turn.
        example: the record as passed to reward functions.
        number: index in the stream.
        media: media items among the tokens, in order.
        source: index of its source.
    """

    token_ids: list[int]
    example: dict[str, Any]
    number: int
    messages: list[Message] = field(default_factory=list)
    media: tuple[Media, ...] = ()
    source: int = 0


class PromptStream:
    """Draws prompts. Skips and counts prompts that are too long and, optionally, rejected records.

    Args:
        sources: configs of the sources.
        chat: tokenises chats.
        max_tokens: maximum tokens of a prompt.
        seed: seed of the order; None keeps the order of the files.
        tools: JSON schemas of tools available in every prompt.
        read: reader of a record.
        drops_refused: whether to skip rejected records rather than raise.

    Attributes:
        num_drawn: number of records drawn so far.
        num_overlong, num_refused: number of these that were too long, or rejected.
        refused: reason for the first rejection.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        chat: ChatTokenizer,
        max_tokens: int,
        seed: int | None,
        tools: Sequence[dict[str, Any]] = (),
        read: Reader = read_prompt,
        drops_refused: bool = False,
    ):
        self.read, self.drops_refused = read, drops_refused
        self.tools = tuple(tools)
        self.sources, self.chat, self.max_tokens = Sources(sources), chat, max_tokens
        self.sampler = BatchSampler(self.sources.sizes, self.sources.weights, 1, Order(seed))
        self.num_drawn = self.num_overlong = self.num_refused = 0
        self.refused = ""
        self._draws = self._stream()

    def take(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts that are short enough. Raises InputError if a whole pass has none."""
        taken: list[Prompt] = []
        passed_over = 0
        while len(taken) < count:
            prompt = self._short(next(self._draws), self.num_drawn)
            self.num_drawn += 1
            if prompt is not None:
                taken.append(prompt)
                passed_over = 0
                continue
            passed_over += 1
            if passed_over == sum(self.sampler.sizes):
                if self.refused:
                    raise InputError(f"{self.refused}; and no other prompt can be used")
                raise InputError(
                    f"all {passed_over} prompts are longer than rollout.max_prompt_tokens={self.max_tokens}: raise it"
                )
        return taken

    def check_fit(self) -> None:
        """Raises InputError if no prompt is short enough."""
        before = self.state_dict()
        self.take(1)
        self.load_state_dict(before)

    def _short(self, draw: Draw, number: int) -> Prompt | None:
        """Returns a record as a prompt; counts it and returns None if it is skipped."""
        try:
            prompt = self.prompt(draw, number)
        except InputError as error:
            if not self.drops_refused:
                raise
            self.num_refused += 1
            self.refused = self.refused or str(error)
            return None
        if len(prompt.token_ids) <= self.max_tokens:
            return prompt
        self.num_overlong += 1
        return None

    def prompt(self, draw: Draw, number: int) -> Prompt:
        """Returns a record as a prompt of any length."""
        record, config, where = self.sources.find(draw)
        chat = self.read(record, config, where)
        assert isinstance(chat, Chat)  # as returned by readers of prompts
        if self.tools and chat.tools:
            raise InputError(
                f"{where}: has its own tools, but the run has rollout.tools or an environment: remove one of them"
            )
        chat = dataclasses.replace(chat, tools=chat.tools or self.tools)
        opening, example = self.chat.generation_prompt(chat, where), read_example(record, config)
        parts = media_parts(chat.messages)
        for kind, column in MEDIA_PARTS.items():
            # Rewards get paths that they can open, rather than paths relative to the data file.
            if paths := [part["path"] for part in parts if part["type"] == kind]:
                example[column] = [list(path.paths) if isinstance(path, Frames) else path for path in paths]
        return Prompt(opening.input_ids.tolist(), example, number, chat.messages, opening.media, draw[0])

    def every_prompt(self) -> list[Prompt]:
        """Returns all prompts that are short enough, each once, in the order of the files."""
        draws = [(source, place) for source, size in enumerate(self.sources.sizes) for place in range(size)]
        prompts = (self._short(draw, number) for number, draw in enumerate(draws))
        return [prompt for prompt in prompts if prompt is not None]

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn, "num_overlong": self.num_overlong, "num_refused": self.num_refused}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_drawn, self.num_overlong = state["num_drawn"], state["num_overlong"]
        self.num_refused = state.get("num_refused", 0)  # missing in older checkpoints
        self._draws = itertools.islice(self._stream(), self.num_drawn, None)

    def _stream(self) -> Iterator[Draw]:
        return itertools.chain.from_iterable(self.sampler)
