"""Episode of an agent: answers its calls, and ends as a completion with a row for every branch of its history."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from automodel_rl.chat_api.exchange import ChatAnswer, ChatCall
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion, Conversation
from automodel_rl.rollout.agents.codecs import ChatCodecs, answer_of
from automodel_rl.rollout.agents.history import History, TurnPrompt, digest_of
from automodel_rl.rollout.agents.protocol import MODEL, AgentResult
from automodel_rl.rollout.episodes.episode import ASKED, CACHED, CALLS, MALFORMED, SECONDS, TURNS, TurnCodec
from automodel_rl.rollout.episodes.protocol import Turn
from automodel_rl.rollout.seeds import turn_seed

ROWS, ROOTS, SIBLINGS, REPLAYS = "rows", "new_roots", "siblings", "replays"
LEFT_OUT, AGAIN, REFUSED = "left_out_tokens", "context_again", "refused_calls"
OVER_LIMIT = "This conversation has reached its limit. No further answer can be given."
"""Answer to an agent's first call after a limit. Not empty, as programs retry after an empty answer."""

MAX_CHARACTERS = 256
"""Upper bound of the characters of a token; large vocabularies have long runs of spaces."""

MAX_REPLAYS = 64
"""Most answers kept for retries."""


class NoMoreCallsError(InputError):
    """The episode is over or has reached a limit; a retry would not help."""


class TooLongError(InputError):
    """A prompt leaves no room for an answer."""


@dataclass(frozen=True)
class AgentLimits:
    """Limits of an agent's episode.

    Attributes:
        turns: most calls.
        sequence_tokens: most tokens of a row.
        turn_tokens: most tokens of a turn.
        seconds: timeout of the agent.
        staleness: most policy versions that the oldest turn may be behind the newest before further calls are
            refused.
    """

    turns: int
    sequence_tokens: int
    turn_tokens: int
    seconds: float
    staleness: int


@dataclass(eq=False)
class WaitingCall:
    """A turn to be generated. `give` may be called in any thread."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Completion]"

    def give(self, completion: Completion) -> None:
        def give() -> None:
            if not self.future.done():
                self.future.set_result(completion)

        with contextlib.suppress(RuntimeError):  # the endpoint has ended
            self.loop.call_soon_threadsafe(give)


@dataclass(frozen=True)
class TurnRequested:
    """Event for the driver: a call waits for a generator."""

    episode: "AgentEpisode"
    number: int


@dataclass(frozen=True)
class EpisodeEnded:
    """Event for the driver: an episode is over."""

    episode: "AgentEpisode"


@dataclass(frozen=True)
class EpisodeFailed:
    """Event for the driver: an episode cannot continue."""

    error: BaseException


class AgentEpisode:
    """State of an agent's episode. It outlives the generator that writes its turns.

    All methods are called in the endpoint's event loop, except `attach`.

    Args:
        request: seed, sampling and conversation for all calls.
        example: the record for the agent.
        seed: for the agent, shared by all episodes of a prompt.

    Attributes:
        key: authenticates the agent's calls.
        is_over: no further call is answered.
        has_begun: its agent was started.
        completion: the whole episode, once it is over.
        overridden: the agent's sampling settings that the run has overridden.
        refused: errors of refused calls.
        waiting: calls that await a generator.
    """

    def __init__(
        self,
        request: Request,
        example: dict[str, Any],
        seed: int,
        codecs: ChatCodecs,
        limits: AgentLimits,
        newest_version: Callable[[], int],
    ):
        self.first, self.example, self.seed = request, example, seed
        self.codecs, self.limits = codecs, limits
        self.newest_version = newest_version
        self.key = secrets.token_hex(16)
        self.history, self.is_over, self.has_begun = History(), False, False
        self.completion = Completion([], [], "error", "it has not begun")
        self.overridden: dict[str, Any] = {}
        self.refused: list[str] = []
        self._limit, self._began, self._has_ended = "", time.monotonic(), False
        self._num_calls, self._num_replays, self._malformed = 0, 0, 0
        self._numbers, self._asked = itertools.count(), Counter[bytes]()
        self._answers: OrderedDict[bytes, list[asyncio.Task[ChatAnswer]]] = OrderedDict()
        self._received_ids: set[str] = set()
        self._turn = asyncio.Lock()  # an agent's calls are rendered and added to the history one at a time
        self._lock, self._events = threading.Lock(), SimpleQueue[TurnRequested | EpisodeEnded | EpisodeFailed]()
        self.waiting: dict[int, WaitingCall] = {}

    def attach(self, events: "SimpleQueue[Any]") -> None:
        """Switches events to another driver's queue, and repeats those of waiting calls there."""
        with self._lock:
            self._events = events
            for number in self.waiting:
                events.put(TurnRequested(self, number))
            if self._has_ended:
                events.put(EpisodeEnded(self))

    async def answer(self, call: ChatCall, identity: bytes, *, is_retry: bool) -> ChatAnswer:
        """Answers a call. A retry of a client that gave up waiting gets the same answer.

        Args:
            identity: equal for a call and its retries only.
            is_retry: the client says that this is a retry.

        Raises:
            NoMoreCallsError: the episode is over, or had reached a limit.
            TooLongError: there is no room for an answer.
            InputError: the call cannot be served.
        """
        tasks = self._answers.setdefault(identity, [])
        self._answers.move_to_end(identity)
        while len(self._answers) > MAX_REPLAYS:
            self._answers.popitem(last=False)
        if is_retry and tasks:
            self._num_replays += 1
            task = next((one for one in tasks if not self._was_received(one)), tasks[-1])
        else:
            task = asyncio.ensure_future(self._answer(call))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client may be gone
            tasks.append(task)
        # A client that gives up does not cancel the turn: it will retry.
        return await asyncio.shield(task)

    def mark_received(self, answer: ChatAnswer) -> None:
        """Records that the agent received an answer."""
        self.history.mark_received(answer.id)
        self._received_ids.add(answer.id)

    def _was_received(self, task: "asyncio.Task[ChatAnswer]") -> bool:
        is_answered = task.done() and not task.cancelled() and task.exception() is None
        return is_answered and task.result().id in self._received_ids

    async def _answer(self, call: ChatCall) -> ChatAnswer:
        if self.is_over:
            raise NoMoreCallsError("the episode of this key is over: the agent has returned, or was ended")
        name, model = secrets.token_hex(8), MODEL
        async with self._turn:
            if self._limit:
                raise NoMoreCallsError(f"{self._limit}: already reported, end the episode")
            self._limit = self._reached_limit()
            if self._limit:
                return ChatAnswer(name, model, OVER_LIMIT)
            self.overridden |= call.overridden
            tools, codec, turn_prompt = await asyncio.to_thread(self._turn_prompt, call)
            if self.is_over:
                raise NoMoreCallsError("the episode of this key is over: the agent has returned, or was ended")
            self._num_calls += 1
            number = self._num_calls
        limit = min(self.limits.sequence_tokens - len(turn_prompt.prompt), self.limits.turn_tokens)
        most = min(limit, call.max_tokens or limit)
        completion = await self._sampled(turn_prompt, most, call.stop)
        if completion.finish == "error":
            raise NoMoreCallsError(f"no generator could write the turn: {completion.error}")
        completion, turn = await asyncio.to_thread(_read, codec, turn_prompt.prompt, completion, call.stop)
        num_written = len(completion.token_ids)
        answer = answer_of(
            turn, name, model, call.stop, len(turn_prompt.prompt), num_written, is_parallel=call.is_parallel
        )
        async with self._turn:
            if not self.is_over:
                is_truncated = turn.is_truncated and most == limit
                self.history.add(turn_prompt, completion, tools, turn, answer, number=number, is_truncated=is_truncated)
                self._malformed += bool(turn.problem)
        return answer

    def _turn_prompt(self, call: ChatCall) -> tuple[str, TurnCodec, TurnPrompt]:
        """Returns the digest of a call's tools, their codec, and the tokens before the answer."""
        self._check_length(call)
        tools, codec = self.codecs.of(call.tools)
        turn_prompt = (
            self.history.turn_prompt_after(call.previous.removeprefix("resp_"), call.messages, tools, codec)
            if call.previous
            else self.history.turn_prompt(call.messages, tools, codec)
        )
        if len(turn_prompt.prompt) >= self.limits.sequence_tokens:
            raise self._too_long(f"{len(turn_prompt.prompt)} tokens")
        return tools, codec, turn_prompt

    def _check_length(self, call: ChatCall) -> None:
        """Raises TooLongError for what must be too long, before the chat template writes it."""
        num_characters = _num_characters([call.messages, [*call.tools]])
        if num_characters > MAX_CHARACTERS * self.limits.sequence_tokens:
            raise self._too_long(f"{num_characters} characters")

    def _too_long(self, length: str) -> TooLongError:
        return TooLongError(
            f"the messages have {length}, but only {self.limits.sequence_tokens} tokens fit with an answer "
            "(rollout.max_prompt_tokens + rollout.max_tokens): send fewer"
        )

    async def count_tokens(self, call: ChatCall) -> int:
        """Counts the tokens of a call's messages, without recording it. Raises TooLongError if there are far too
        many."""

        def count() -> int:
            self._check_length(call)
            _, codec = self.codecs.of(call.tools)
            return len(codec.prompt_ids(call.messages))

        async with self._turn:
            return await asyncio.to_thread(count)

    async def _sampled(self, turn_prompt: TurnPrompt, max_tokens: int, stop: tuple[str, ...]) -> Completion:
        digest = digest_of(turn_prompt.prompt)
        seed = turn_seed(self.first.seed, turn_prompt.prompt, self._asked[digest])
        self._asked[digest] += 1
        sampling = self.first.sampling
        sampling = dataclasses.replace(sampling, max_tokens=max_tokens, stop=(*sampling.stop, *stop))
        request = dataclasses.replace(
            self.first, prompt=turn_prompt.prompt, seed=seed, sampling=sampling, routes_from=turn_prompt.num_routed
        )
        loop = asyncio.get_running_loop()
        call, number = WaitingCall(request, loop, loop.create_future()), next(self._numbers)
        with self._lock:
            self.waiting[number] = call
            self._events.put(TurnRequested(self, number))
        try:
            return await call.future
        finally:
            with self._lock:
                self.waiting.pop(number, None)

    def _reached_limit(self) -> str:
        """Returns the limit that prevents further calls; empty if none does."""
        if self._num_calls >= self.limits.turns:
            return f"rollout.max_turns={self.limits.turns} calls were made"
        oldest = min((t.completion.versions[0] for t in self.history.turns if t.completion.versions), default=None)
        if oldest is not None and self.newest_version() - oldest > self.limits.staleness:
            return f"its first turns are older than rollout.max_staleness={self.limits.staleness} policy versions"
        return ""

    def finish(self, result: AgentResult, failed: float | None, error: str = "", *, needs_reward: bool = False) -> None:
        """Ends the episode.

        Args:
            failed: reward if the agent failed; None to drop the episode.
            error: why it failed; empty if it did not.
            needs_reward: a missing reward is an error.
        """
        self.is_over = True
        with self._lock:
            left, self.waiting = self.waiting, {}
        for call in left.values():  # the agent did not wait for these answers
            if not call.future.done():
                call.future.set_exception(NoMoreCallsError("the episode of this key is over"))
        turns, reward = self.history.turns, result.reward
        if error and failed is not None:
            reward = failed
        if not turns:
            error, failed = error or "the agent made no call", None
        elif not error and needs_reward and reward is None:
            error, failed = "the agent returned no reward: return a number", None
        branches = self.history.branches()
        if error and failed is None:
            self.completion = Completion([], [], "error", error, conversation=self._conversation(error, 0.0, result))
        else:
            main, *others = branches
            versions = [turn.completion.versions for turn in turns if turn.completion.versions is not None]
            is_truncated = bool(error or self._limit or self.history.leaves[0].is_truncated)
            conversation = self._conversation(error or self._limit or "done", reward or 0.0, result)
            self.completion = Completion(
                main.token_ids,
                main.logprobs,
                "length" if is_truncated else "stop",
                versions=(min(v[0] for v in versions), max(v[1] for v in versions)) if versions else None,
                routes=main.routes,
                conversation=dataclasses.replace(
                    conversation, prompt=main.prompt, sampled=main.sampled, branches=others
                ),
            )
        with self._lock:
            self._has_ended = True
            self._events.put(EpisodeEnded(self))

    def _conversation(self, end: str, reward: float, result: AgentResult) -> Conversation:
        history, turns = self.history, self.history.turns
        last = history.leaves[0].path if turns else []
        return Conversation(
            prompt=[],
            messages=[message for turn in last for message in turn.messages],
            reward=reward,
            end=end,
            metrics={**self._counts(), **{f"agent_{name}": value for name, value in result.metrics.items()}},
            tree=_tree(history),
            forks=dict(history.forks()),
            is_agent_episode=True,
        )

    def _counts(self) -> dict[str, float]:
        turns, leaves = self.history.turns, self.history.leaves
        kept = {id(turn) for leaf in leaves for turn in leaf.path}
        cached = [turn for turn in turns if turn.parent is not None and turn.completion.num_cached is not None]
        others = self.history.branches()[1:]
        return {
            TURNS: len(turns),
            CALLS: sum(len(turn.answer.calls) for turn in turns),
            MALFORMED: self._malformed,
            SECONDS: time.monotonic() - self._began,
            ROWS: len(leaves),
            ROOTS: sum(turn.kind == "root" for turn in turns),
            SIBLINGS: sum(turn.kind == "sibling" for turn in turns),
            REPLAYS: self._num_replays,
            REFUSED: len(self.refused),
            LEFT_OUT: sum(len(turn.completion.token_ids) for turn in turns if id(turn) not in kept),
            AGAIN: sum(len(row.prompt) + row.sampled.count(False) for row in others),
            CACHED: sum(turn.completion.num_cached or 0 for turn in cached),
            ASKED: sum(len(turn.token_ids) - len(turn.completion.token_ids) for turn in cached),
        }

    def report_failure(self, error: BaseException) -> None:
        """Reports an error to the driver that is not the agent's."""
        with self._lock:
            self._events.put(EpisodeFailed(error))

    def begin(self) -> None:
        self._began = time.monotonic()


def identity_of(route: str, body: bytes) -> bytes:
    return hashlib.sha256(route.encode() + b"\0" + body).digest()


def _num_characters(value: Any) -> int:
    """Returns a lower bound of the characters of a JSON value, without keys."""
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        else:
            count += len(one) if isinstance(one, str) else 1
    return count


def _read(
    codec: TurnCodec, prompt_ids: Sequence[int], completion: Completion, stop: Sequence[str]
) -> tuple[Completion, Turn]:
    completion = _until_stop(codec, prompt_ids, completion, stop)
    turn = codec.read(prompt_ids, completion.token_ids)
    return completion, dataclasses.replace(turn, is_truncated=completion.finish == "length")


def _until_stop(codec: TurnCodec, prompt_ids: Sequence[int], completion: Completion, stop: Sequence[str]) -> Completion:
    """Cuts a turn after the token that completes a stop text. That token is trained as sampled, though it may contain
    more text than the agent receives. A generator that samples several tokens at a time may write past it."""

    def holds_stop(num_tokens: int) -> bool:
        text = codec.read(prompt_ids, completion.token_ids[:num_tokens]).text
        return any(one in text for one in stop)

    num_tokens = len(completion.token_ids)
    if not stop or not holds_stop(num_tokens):
        return completion
    while holds_stop(num_tokens - 1):
        num_tokens -= 1
    token_ids, logprobs = completion.token_ids[:num_tokens], completion.logprobs[:num_tokens]
    return dataclasses.replace(completion, token_ids=token_ids, logprobs=logprobs, finish="stop")


def _tree(history: History) -> list[dict[str, Any]]:
    numbers = {id(turn): number for number, turn in enumerate(history.turns)}
    kept = {id(turn) for leaf in history.leaves for turn in leaf.path}
    return [
        {
            "parent": None if turn.parent is None else numbers[id(turn.parent)],
            "kind": turn.kind,
            "reason": turn.reason,
            "messages": turn.messages,
            "tokens": len(turn.completion.token_ids),
            "context": len(turn.suffix),
            "trained": id(turn) in kept,
        }
        for turn in history.turns
    ]
