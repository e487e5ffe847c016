"""One episode: a conversation that advances turn by turn, until its environment or a limit ends it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from automodel_rl.generator_messages import Request
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn
from automodel_rl.rollout.episodes.transcript import Transcript
from automodel_rl.rollout.protocol import Completion


class TurnCodec(Protocol):
    """Reads turns and writes what is between them, as the model's chat template does."""

    def read(self, opening: Sequence[int], token_ids: Sequence[int]) -> Turn:
        """A turn of the assistant, given the tokens before it and its own."""
        ...

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        """The tokens of messages that follow a turn, up to the beginning of the next turn."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits of an episode.

    Attributes:
        turns: most turns of the assistant.
        tokens: most tokens after the prompt, those of tools and of the chat template included.
        turn_tokens: most tokens of a turn. A turn begins only if so many are left.
    """

    turns: int
    tokens: int
    turn_tokens: int


class Episode:
    """The state of one conversation.

    Args:
        request: asks for the first turn.
        codec: reads turns and writes what is between them.
        limits: when it ends at the latest.

    Attributes:
        transcript: its tokens.
        reward: the sum of its turns' rewards.
        reason: why it ended; empty while it goes on.
    """

    def __init__(self, request: Request, codec: TurnCodec, limits: Limits):
        self.first, self.codec, self.limits = request, codec, limits
        self.transcript = Transcript(request.prompt)
        self.reward, self.reason = 0.0, ""
        self._turn = Turn("")

    @property
    def request(self) -> Request:
        """Asks for the next turn. The turn's number is part of its seed, so that asking again gives the same turn."""
        number = len(self.transcript.turns)
        seed = (
            self.first.seed
            if not number
            else int(np.random.SeedSequence([self.first.seed, number]).generate_state(1)[0])
        )
        return dataclasses.replace(self.first, prompt=self.transcript.opening, seed=seed)

    def take(self, completion: Completion) -> Turn:
        """Adds a turn, and returns it as the environment sees it."""
        opening = self.transcript.opening
        self.transcript.add_turn(completion)
        turn = self.codec.read(opening, completion.token_ids)
        self._turn = dataclasses.replace(turn, is_cut=completion.finish == "length")
        return self._turn

    def answer(self, outcome: Outcome) -> None:
        """Adds what the environment answers, or ends the episode."""
        self.reward += outcome.reward
        transcript = self.transcript
        if outcome.done or not outcome.messages:
            self.reason = outcome.reason or "done"
        elif self._turn.is_cut:
            self.reason = "turn too long"
        elif len(transcript.turns) == self.limits.turns:
            self.reason = "turns"
        else:
            suffix = self.codec.suffix(outcome.messages, self._turn, transcript.token_ids[-1])
            if len(transcript.token_ids) + len(suffix) + self.limits.turn_tokens > self.limits.tokens:
                self.reason = "tokens"
            else:
                transcript.add_suffix(suffix)
