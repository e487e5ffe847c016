"""Episode: a conversation that advances turn by turn, until its environment or a limit ends it."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion, Conversation
from automodel_rl.rollout.episodes.protocol import Environment, Message, Outcome, Turn
from automodel_rl.rollout.episodes.transcript import Transcript
from automodel_rl.rollout.seeds import turn_seed

TURNS, CALLS, MALFORMED = "turns", "calls", "malformed_calls"
CACHED, ASKED = "cached_tokens", "asked_tokens"
SECONDS, ENVIRONMENT_ERRORS = "environment_seconds", "environment_errors"


class TurnCodec(Protocol):
    """Parses turns, and writes what is between them, as the model's chat template does."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens of messages, up to the start of the first turn."""
        ...

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Turn:
        """Parses a turn, given the tokens before it."""
        ...

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        """Returns the tokens of messages between two turns. Raises InputError if the template cannot write them
        there."""
        ...


@dataclass(frozen=True)
class Limits:
    """Limits of an episode.

    Attributes:
        prompt_tokens: most tokens of the prompt, with the environment's first messages.
        turns: most turns of the assistant.
        tokens: most tokens after the prompt, including those of tools and the chat template.
        turn_tokens: most tokens of a turn. A turn starts only if this many are left.
        seconds: time after which no turn starts; None for no limit.
    """

    prompt_tokens: int
    turns: int
    tokens: int
    turn_tokens: int
    seconds: float | None = None


class Episode:
    """State of one conversation. It outlives the generator that writes its turns.

    Args:
        request: that of the first turn.
        messages: the prompt.
        environment: closed at the end.

    Attributes:
        phase: "new" until the environment has begun, "ready" for the next turn, or "over".
        completion: the whole episode, once it is over.
    """

    def __init__(
        self,
        request: Request,
        messages: Sequence[Message],
        environment: Environment,
        codec: TurnCodec,
        limits: Limits,
    ):
        self.first, self.environment, self.codec, self.limits = request, environment, codec, limits
        self.transcript = Transcript(request.prompt)
        self.messages = list(messages)
        self.phase: Literal["new", "ready", "over"] = "new"
        self.completion = Completion([], [], "error", "it has not begun")
        self._reward, self._metrics = 0.0, defaultdict[str, float](float)
        self._turn, self._began = Turn(""), time.monotonic()

    @property
    def request(self) -> Request:
        """The request of the next turn. A repeated request gives the same turn."""
        prompt_ids = self.transcript.prompt_ids
        seed = turn_seed(self.first.seed, prompt_ids)
        return dataclasses.replace(self.first, prompt=prompt_ids, seed=seed, routes_from=self.transcript.num_routed)

    def begin(self, messages: Sequence[Message], seconds: float = 0.0) -> None:
        """Adds the environment's first messages to the prompt."""
        self._count({SECONDS: seconds})
        self.phase, self._began = "ready", time.monotonic()
        if not messages:
            return
        self.messages = _joined(self.messages, messages)
        try:
            prompt = self.codec.prompt_ids(self.messages)
        except InputError as error:
            self.fail(describe_root_cause(error))
            return
        self.transcript = Transcript(prompt)
        if len(prompt) > self.limits.prompt_tokens:
            self.fail(
                f"the prompt with the messages of reset has {len(prompt)} tokens, more than rollout.max_prompt_tokens="
                f"{self.limits.prompt_tokens}"
            )

    def take(self, completion: Completion) -> Turn:
        """Adds a turn, and returns it parsed."""
        prompt_ids = self.transcript.prompt_ids
        self.transcript.add_turn(completion)
        turn = self.codec.read(prompt_ids, completion.token_ids)
        self._turn = dataclasses.replace(turn, is_truncated=completion.finish == "length")
        self.messages.append(_message_of(self._turn))
        if completion.num_cached is not None and len(self.transcript.turns) > 1:
            self._count({CACHED: completion.num_cached, ASKED: len(prompt_ids)})
        self._count({TURNS: 1, CALLS: len(turn.calls), MALFORMED: int(bool(turn.problem))})
        return self._turn

    def answer(self, outcome: Outcome, seconds: float = 0.0) -> None:
        self._reward += outcome.reward
        self._count({**outcome.metrics, SECONDS: seconds})
        transcript = self.transcript
        if outcome.done or not outcome.messages:
            self._finish("done")
        elif self._turn.is_truncated:
            self._finish("turn_tokens")
        elif len(transcript.turns) == self.limits.turns:
            self._finish("turns")
        elif self.limits.seconds is not None and time.monotonic() - self._began > self.limits.seconds:
            self._finish("seconds")
        else:
            self._go_on(outcome.messages)

    def fail(self, error: str, metrics: Mapping[str, float] | None = None) -> None:
        self._count(metrics or {})
        self._over(Completion([], [], "error", error, conversation=self._conversation("error", [])))

    def _go_on(self, messages: Sequence[Message]) -> None:
        """Adds messages before the next turn, if the template can write them and the limits allow it."""
        transcript = self.transcript
        try:
            suffix = self.codec.suffix(messages, self._turn, transcript.token_ids[-1])
        except InputError:  # nothing can follow the way the turn ended
            self._finish("template")
            return
        if len(transcript.token_ids) + len(suffix) + self.limits.turn_tokens > self.limits.tokens:
            self._finish("tokens")
            return
        self.messages += messages
        transcript.add_suffix(suffix)

    def _finish(self, end: str) -> None:
        transcript = self.transcript
        is_whole = end in ("done", "template") and not self._turn.is_truncated
        self._over(
            Completion(
                transcript.token_ids,
                transcript.logprobs,
                "stop" if is_whole else "length",
                versions=transcript.versions,
                routes=transcript.routes,
                conversation=self._conversation(end, transcript.sampled),
            )
        )

    def _conversation(self, end: str, sampled: list[bool]) -> Conversation:
        prompt, metrics = self.transcript.prompt, dict[str, float](self._metrics)
        return Conversation(prompt, sampled, self.messages, self._reward, end, metrics)

    def _count(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[name] += value

    def _over(self, completion: Completion) -> None:
        self.phase, self.completion = "over", completion
        self.environment.close()


def _joined(prompt: list[Message], messages: Sequence[Message]) -> list[Message]:
    """Appends messages to a prompt, joining two consecutive messages of the user, which many chat templates refuse."""
    if not prompt or prompt[-1]["role"] != "user" or messages[0]["role"] != "user":
        return [*prompt, *messages]
    both = {**prompt[-1], "content": f"{prompt[-1]['content']}{messages[0]['content']}"}
    return [*prompt[:-1], both, *messages[1:]]


def _message_of(turn: Turn) -> dict[str, Any]:
    if turn.problem or not turn.calls:
        return {"role": "assistant", "content": turn.text}
    calls = [{"type": "function", "function": dict(call)} for call in turn.calls]
    return {"role": "assistant", "content": turn.content, "tool_calls": calls}
