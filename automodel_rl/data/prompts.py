"""Prompts for rollouts: one endless stream, the same on every rank and in every run."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.records import read_example, read_prompt
from automodel_rl.data.sampler import BatchSampler, Draw, Order
from automodel_rl.data.sources import Sources
from automodel_rl.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """One prompt of the stream.

    Attributes:
        token_ids: up to where the assistant writes.
        example: the record, for reward functions.
        number: its place in the stream.
    """

    token_ids: list[int]
    example: dict[str, Any]
    number: int


class PromptStream:
    """Draws prompts; those that are too long are passed over and counted.

    Args:
        sources: where records come from.
        chat: makes token ids of messages.
        max_tokens: longest prompt.
        seed: of the order; None keeps that of the files.

    Attributes:
        num_drawn: records drawn so far, from all of which a run can go on.
        num_overlong: of them, those passed over.
    """

    def __init__(self, sources: Sequence[SourceConfig], chat: ChatTokenizer, max_tokens: int, seed: int | None):
        self.sources, self.chat, self.max_tokens = Sources(sources), chat, max_tokens
        self.sampler = BatchSampler(self.sources.sizes, self.sources.weights, 1, Order(seed))
        self.num_drawn = self.num_overlong = 0
        self._draws = self._stream()

    def take(self, count: int) -> list[Prompt]:
        """The next prompts that fit."""
        taken: list[Prompt] = []
        passed_over = 0
        while len(taken) < count:
            prompt = self.prompt(next(self._draws), self.num_drawn)
            self.num_drawn += 1
            if len(prompt.token_ids) <= self.max_tokens:
                taken.append(prompt)
                passed_over = 0
                continue
            self.num_overlong += 1
            passed_over += 1
            if passed_over == sum(self.sampler.sizes):
                raise InputError(
                    f"all {passed_over} prompts are longer than rollout.max_prompt_tokens={self.max_tokens}: raise it"
                )
        return taken

    def check_fit(self) -> None:
        """Raises InputError if no prompt is short enough."""
        before = self.state_dict()
        self.take(1)
        self.load_state_dict(before)

    def prompt(self, draw: Draw, number: int) -> Prompt:
        """A record as a prompt, of any length."""
        record, config, where = self.sources.find(draw)
        chat = read_prompt(record, config, where)
        return Prompt(self.chat.opening(chat, where), read_example(record, config), number)

    def every_prompt(self) -> list[Prompt]:
        """Each record once, in the order of the files, less those that are too long."""
        draws = [(source, place) for source, size in enumerate(self.sources.sizes) for place in range(size)]
        prompts = [self.prompt(draw, number) for number, draw in enumerate(draws)]
        return [prompt for prompt in prompts if len(prompt.token_ids) <= self.max_tokens]

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn, "num_overlong": self.num_overlong}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_drawn, self.num_overlong = state["num_drawn"], state["num_overlong"]
        self._draws = itertools.islice(self._stream(), self.num_drawn, None)

    def _stream(self) -> Iterator[Draw]:
        return itertools.chain.from_iterable(self.sampler)
