"""History of an agent's episode: a tree of turns, each with the tokens that it was sampled with.

An agent sends texts. Messages that it sends again are matched to a path of sampled turns, whose tokens are reused:

    next prompt = prompt of the path's last turn + that turn as sampled + suffix for the new messages

Without a match, the chat template writes all messages as a new root, where turns of the assistant are context. Each
path from a root to a leaf is a row to train on. A turn in several rows has loss in the first of them only.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from automodel_rl.chat_api.exchange import ChatAnswer, Message
from automodel_rl.chat_api.messages import with_results_in_order
from automodel_rl.errors import InputError
from automodel_rl.generators.protocol import Branch, Completion
from automodel_rl.rollout.agents.sameness import NormalizedMessage, calls_of, normalized, sampled
from automodel_rl.rollout.episodes.episode import TurnCodec
from automodel_rl.rollout.episodes.protocol import Turn
from automodel_rl.rollout.episodes.transcript import Transcript

Kind = Literal["first", "extension", "sibling", "root"]
"""How a call continues the history: as its first call, after a turn without children (extension) or with some
(sibling), or with a new root."""

MAY_FOLLOW = ("tool", "user")
"""Roles of messages that the chat template can write after a turn."""


@dataclass(frozen=True)
class TurnPrompt:
    """Tokens before a turn that is to be sampled.

    Attributes:
        parent: the turn that it follows; None for a root.
        messages: new ones after the parent's.
        prompt: all tokens before the turn.
        suffix: those written by the template after the parent; all of them for a root.
        reason: why a new root was needed.
    """

    parent: "SampledTurn | None"
    messages: list[Message]
    prompt: list[int]
    suffix: list[int]
    kind: Kind
    reason: str = ""

    @property
    def num_routed(self) -> int:
        """Number of tokens whose routes earlier turns have. A turn's last token was sampled, but never computed."""
        return 0 if self.parent is None else len(self.prompt) - len(self.suffix) - 1


@dataclass(eq=False)
class SampledTurn:
    """A node of the tree.

    Attributes:
        parent, messages, suffix: as of its `TurnPrompt`. The messages end with the turn's own.
        normalized: the messages, in the form for comparison.
        digest: of the prompt.
        tools: digest of the tools in the prompt.
        turn: the parsed turn.
        answer: the answer to the agent.
        kind, reason: how its call continued the history, and the cause of a fork.
        number: of its call in the episode, from 1 on.
        is_truncated: a limit of the run ended it, not one of the agent's.
        was_received: the agent received it: a client may have given up.
    """

    parent: "SampledTurn | None"
    messages: list[Message]
    normalized: list[NormalizedMessage]
    suffix: list[int]
    digest: bytes
    completion: Completion
    tools: str
    turn: Turn
    answer: ChatAnswer
    kind: Kind
    reason: str
    number: int
    is_truncated: bool
    was_received: bool = False
    children: "list[SampledTurn]" = field(default_factory=list)

    @property
    def path(self) -> "list[SampledTurn]":
        """Turns from the root to this one."""
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.path for token in (*turn.suffix, *turn.completion.token_ids)]

    @property
    def transcript(self) -> Transcript:
        """Tokens of its path, as generators read and wrote them."""
        first, *others = self.path
        transcript = Transcript(first.suffix)
        transcript.add_turn(first.completion)
        for turn in others:
            transcript.add_suffix(turn.suffix)
            transcript.add_turn(turn.completion)
        return transcript


class History:
    def __init__(self) -> None:
        self.turns: list[SampledTurn] = []

    def turn_prompt(self, messages: Sequence[Message], tools: str, codec: TurnCodec) -> TurnPrompt:
        """Returns the tokens for a call that sends all messages.

        Args:
            tools: digest of its tools.
            codec: writes messages with these tools.

        Raises:
            InputError: the chat template cannot write the messages.
        """
        parent, used, reason = self._find(messages, tools)
        if parent is None:
            return self._root(messages, codec, reason)
        return self._after(parent, messages[used:], messages, codec, reason)

    def turn_prompt_after(self, name: str, messages: Sequence[Message], tools: str, codec: TurnCodec) -> TurnPrompt:
        """Returns the tokens for a call whose messages follow the answer with the id `name`. See `turn_prompt`.

        Raises:
            InputError: the episode has no such answer, or the chat template cannot write the messages.
        """
        parent = next((turn for turn in self.turns if turn.answer.id == name), None)
        if parent is None:
            raise InputError(f"previous_response_id: unknown answer {name} in this episode: send all messages")
        known = [message for turn in parent.path for message in turn.messages]
        instructions = [message for message in messages[:1] if message["role"] == "system"]
        results = with_results_in_order([*known, *messages[len(instructions) :]])[len(known) :]
        new = [*instructions, *results]
        if instructions:  # sent with every call
            own = parent.path[0].normalized[0]
            if own.role != "system" or not own.is_same(new[0]):
                rest = known[1:] if own.role == "system" else known
                return self._root([new[0], *rest, *new[1:]], codec, "the system text changed")
            del new[0]
        if parent.tools != tools:
            return self._root([*known, *new], codec, "tools changed")
        return self._after(parent, new, [*known, *new], codec, "")

    def add(
        self,
        turn_prompt: TurnPrompt,
        completion: Completion,
        tools: str,
        turn: Turn,
        answer: ChatAnswer,
        *,
        number: int,
        is_truncated: bool,
    ) -> SampledTurn:
        """Adds a sampled turn. The arguments are attributes of `SampledTurn`."""
        parent, digest, kind, reason = (
            turn_prompt.parent,
            digest_of(turn_prompt.prompt),
            turn_prompt.kind,
            turn_prompt.reason,
        )
        if parent is not None and parent.children:  # others may have followed it in the meantime
            kind, reason = "sibling", "one history continued in two ways"
        if kind != "first" and any(one.digest == digest for one in self.turns):
            reason = "the same messages were sent again"
        message = _message_of(answer)
        own = sampled(answer.content, turn.text, answer.reasoning, calls_of(message))
        new = SampledTurn(
            parent,
            [*turn_prompt.messages, message],
            [*map(normalized, turn_prompt.messages), own],
            turn_prompt.suffix,
            digest,
            completion,
            tools,
            turn,
            answer,
            kind,
            reason,
            number,
            is_truncated,
        )
        self.turns.append(new)
        if parent is not None:
            parent.children.append(new)
        return new

    def mark_received(self, name: str) -> None:
        """Records that the agent received the answer with the id `name`."""
        for turn in self.turns:
            turn.was_received = turn.was_received or turn.answer.id == name

    @property
    def leaves(self) -> list[SampledTurn]:
        """Last turns of rows. The first is that of the last call whose answer was received; the others are sorted by
        tokens, as an agent's concurrent calls come in any order.

        Excluded are turns that the agent did not receive, as its client had given up, and turns that it dropped: it
        sent the same messages again, and continued from that answer.
        """
        told = [turn for turn in self.turns if turn.was_received]
        if not told:
            return self.turns[-1:]
        last = max(told, key=lambda turn: turn.number)
        seen = {id(one) for turn in told for one in turn.path}
        inner = {id(turn.parent) for turn in self.turns if id(turn) in seen}
        followed = {turn.digest for turn in self.turns if id(turn) in inner}
        ends = [turn for turn in self.turns if id(turn) in seen and id(turn) not in inner and turn is not last]
        kept = [turn for turn in ends if turn.digest not in followed]
        return [last, *sorted(kept, key=lambda turn: turn.token_ids)]

    def branches(self) -> list[Branch]:
        """Returns the rows to train on, that of the last call first."""
        counted: set[int] = set()
        rows = []
        for leaf in self.leaves:
            transcript = leaf.transcript
            counts = [*transcript.sampled]
            for turn, end in zip(leaf.path, transcript.ends, strict=True):
                stop = end - len(transcript.prompt)
                if id(turn) in counted:
                    counts[stop - len(turn.completion.token_ids) : stop] = [False] * len(turn.completion.token_ids)
                counted.add(id(turn))
            rows.append(Branch(transcript.prompt, transcript.token_ids, transcript.logprobs, counts, transcript.routes))
        return rows

    def forks(self) -> Counter[str]:
        return Counter(turn.reason for turn in self.turns if turn.reason)

    def _find(self, messages: Sequence[Message], tools: str) -> tuple[SampledTurn | None, int, str]:
        """Returns the deepest turn whose whole path is sent again, the newest of several; the number of messages of
        its path; and why no deeper turn matches."""
        fitting: list[tuple[int, int]] = []  # number of messages of a path, index of its last turn
        reasons: list[tuple[int, str]] = []  # number of equal messages, and why no more are
        places = {id(turn): place for place, turn in enumerate(self.turns)}
        waiting = deque((turn, 0) for turn in self.turns if turn.parent is None)
        while waiting:
            turn, start = waiting.popleft()
            end = start + len(turn.normalized)
            pairs = enumerate(zip(turn.normalized, messages[start:], strict=False), start)
            differs = next((place for place, (old, new) in pairs if not old.is_same(new)), min(end, len(messages)))
            if turn.tools != tools:
                reasons.append((differs, "tools changed"))
            elif differs < end:
                reasons.append((differs, _why(turn.normalized, messages, start, differs)))
            else:
                fitting.append((end, places[id(turn)]))
                waiting += [(child, end) for child in turn.children]
        used, place = max(fitting, default=(0, -1))
        _, reason = max(reasons, key=lambda one: one[0], default=(0, ""))
        return (self.turns[place] if fitting else None), used, reason

    def _after(
        self, parent: SampledTurn, new: Sequence[Message], whole: Sequence[Message], codec: TurnCodec, deeper: str
    ) -> TurnPrompt:
        """Returns the tokens for messages after `parent`, or a new root if they cannot follow it. `deeper` is the
        reason why no deeper turn matches."""
        other = next((message["role"] for message in new if message["role"] not in MAY_FOLLOW), None)
        if parent.turn.is_truncated:
            reason = "a turn that was cut off was continued"
        elif len(parent.turn.calls) > len(parent.answer.calls):
            reason = "the agent received only the first of several calls"
        elif not new:
            reason = "the request ends with an answer"
        elif other is not None:
            reason = deeper or f"a message of {other} was added to the history"
        else:
            try:
                suffix = codec.suffix(new, parent.turn, parent.completion.token_ids[-1])
            except InputError:  # the turn ended with a stop text, or the template refuses the messages
                reason = "the chat template cannot continue where a turn ended"
            else:
                return TurnPrompt(parent, [*new], parent.token_ids + suffix, suffix, "extension")
        return self._root(whole, codec, reason)

    def _root(self, messages: Sequence[Message], codec: TurnCodec, reason: str) -> TurnPrompt:
        prompt = codec.prompt_ids(messages)
        kind: Kind = "root" if self.turns else "first"
        return TurnPrompt(None, [*messages], prompt, prompt, kind, reason)


def digest_of(prompt: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()


def _message_of(answer: ChatAnswer) -> Message:
    """Returns an answer as a message with parsed arguments."""
    message = {**answer.message, "content": answer.content}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _why(known: Sequence[NormalizedMessage], messages: Sequence[Message], start: int, differs: int) -> str:
    if differs >= len(messages):
        return "the history was cut short"
    old = known[differs - start]
    if old.role == "system" or messages[differs]["role"] == "system":
        return "the system text changed"
    if differs == 0:
        return "another conversation began"
    if old.is_sampled:
        return "an answer was changed" if messages[differs]["role"] == "assistant" else "an answer was dropped"
    return "an earlier message was changed"
