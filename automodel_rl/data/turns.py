"""Location of the assistant's turns in a rendered chat, found by changing one turn at a time.

A turn begins where the template, asked for an answer, would stop writing. It ends with the token that passes the turn
to others: an end token or, in templates without end tokens, the mark of the next role. Both also hold for templates
that render earlier turns differently once later ones follow.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.data.kinds import BEGIN_THOUGHT
from automodel_rl.data.messages import Chat, Message, function_of
from automodel_rl.data.template import OTHERS, PROBE, QUESTION, ChatTemplate, Leaf, changed_part
from automodel_rl.errors import InputError

MARKS_REMEDY = (
    "set data.chat_template to a template that puts assistant turns between {% generation %} and {% endgeneration %}"
)
"""Advice in error messages about turns that cannot be located."""

Span = tuple[int, int]
"""Token range of an assistant turn, end exclusive."""


@dataclass(frozen=True)
class FoundTurns:
    """The tokens of a chat and the location of its turns.

    Attributes:
        ids: the chat's token ids. If the template ends turns only with the mark of the next message, and none follows
            the last turn, this mark is appended.
        spans: token range of each turn.
    """

    ids: list[int]
    spans: list[Span]


def find_turns(template: ChatTemplate, chat: Chat, ids: Sequence[int], turns: Sequence[int], where: str) -> FoundTurns:
    """Locates the assistant's turns at the message indices `turns`, given the token ids of the whole chat. Raises
    InputError for a turn that cannot be located."""
    finder = _Finder(template, chat)
    text, token_places = finder.text, TokenOffsets(template.tokenizer, finder.text)
    if token_places.ids != list(ids):
        raise InputError(
            f"{where}: the chat template's text has different tokens when it is tokenised again: {MARKS_REMEDY}"
        )
    spans, added = [], ""
    for turn in turns:
        found = finder.find(turn)
        tokens = None if found is None else token_places.of(*found)
        if found is None or tokens is None:
            raise InputError(
                f"{where}: the tokens of assistant turn {turn} cannot be determined from the chat template's output: "
                f"{MARKS_REMEDY}"
            )
        if turn == len(chat.messages) - 1 and found[1] == len(text):
            added = finder.end_left_to_others(turn)
        spans.append(tokens)
    if not added:
        return FoundTurns([*ids], spans)
    # Text that the template writes after the turn, such as a line break, also belongs to the turn.
    first, last = spans[-1]
    return FoundTurns([*ids, template.tokenizer.convert_tokens_to_ids(added)], [*spans[:-1], (first, last + 1)])


def end_token(template: ChatTemplate, chat: Chat, turn: int) -> str:
    """Returns the special token that ends the turn at index `turn`; empty if there is none, or the turn cannot be
    located."""
    finder = _Finder(template, chat)
    begin, end = finder.find(turn) or (0, 0)
    written = finder.text[begin:end].rstrip()
    if not written:
        return ""
    ending = max((mark for mark in template.special_tokens if written.endswith(mark)), key=len, default="")
    return ending or (finder.end_left_to_others(turn) if turn == len(chat.messages) - 1 else "")


class _Finder:
    """Locates turns in the rendered text of a chat.

    Attributes:
        text: the rendered text.
    """

    def __init__(self, template: ChatTemplate, chat: Chat):
        self.template, self.chat = template, chat
        self._texts: dict[Any, str | None] = {}
        self._values: dict[int, Span | None] = {}
        self.text = self._written(len(chat.messages)) or ""

    def find(self, turn: int) -> Span | None:
        """Returns the character span of a turn, end exclusive; None if it is ambiguous."""
        kept = self._repeated(turn)
        edges, alone = self._values_at(turn), self._ending_alone(turn, kept)
        if edges is None or alone is None:
            return None
        first, last = edges
        begin, ending = self._begin(turn, first), self._num_ending(turn, alone, self.text[last:])
        if begin is None or ending is None or self._holds_neighbours(turn, begin, last + ending):
            return None
        return begin, last + ending

    def _holds_neighbours(self, turn: int, begin: int, end: int) -> bool:
        """Whether a span overlaps the messages before or after a turn, as with templates that render a turn's text
        after the result of its call."""
        before = self._values_at(turn - 1) if turn > 0 else None
        after = self._values_at(turn + 1) if turn + 1 < len(self.chat.messages) else None
        return (before is not None and before[1] > begin) or (after is not None and after[0] < end)

    def _values_at(self, turn: int) -> Span | None:
        """Returns the character span of a message's own content; None if the template renders none."""
        if turn not in self._values:
            self._values[turn] = self._edges(len(self.chat.messages), turn, self._repeated(turn))
        return self._values[turn]

    def end_left_to_others(self, turn: int) -> str:
        """Returns the special token that would begin the message after the last turn, if the template itself ends turns
        with no special token."""
        alone = self._ending_alone(turn, frozenset())
        if alone is None or self._after_specials(alone):
            return ""
        return self._mark_of_next(alone, self._ending_followed(turn) or "")

    def _edges(self, end: int, turn: int, kept: frozenset[Leaf], add_generation_prompt: bool = False) -> Span | None:
        """Computes `_values_at` in the first `end` messages, ignoring the values in `kept`. `add_generation_prompt`
        adds the header of the next turn."""
        text, changed = self._written(end, add_generation_prompt), self._written(end, add_generation_prompt, turn, kept)
        return None if text is None or changed is None else changed_part(text, changed)

    def _written(
        self,
        end: int,
        add_generation_prompt: bool = False,
        turn: int | None = None,
        kept: frozenset[Leaf] = frozenset(),
    ) -> str | None:
        """Renders the first `end` messages, optionally with the values of a turn replaced; None if the template raises.
        Cached."""
        key = (end, add_generation_prompt, turn, kept)
        if key not in self._texts:
            until = self.chat.until(end)
            changed = {} if turn is None else self._numbered(until, turn, kept)
            self._texts[key] = self.template.changed_text(until, changed, add_generation_prompt)
        return self._texts[key]

    def _numbered(self, chat: Chat, turn: int, kept: frozenset[Leaf] = frozenset()) -> Mapping[Leaf, int]:
        values = self.template.values(chat, turn)
        return {leaf: number for number, leaf in enumerate(values) if leaf not in kept}

    def _repeated(self, turn: int) -> frozenset[Leaf]:
        """Returns values of a turn that later messages repeat, such as the name of a called tool."""
        end = len(self.chat.messages)
        if turn == end - 1:
            return frozenset()
        alone, followed = (self._written(until, turn=turn) or "" for until in (turn + 1, end))
        others = {leaf: chr(OTHERS + number) for leaf, number in self._numbered(self.chat, turn).items()}
        return frozenset(leaf for leaf, other in others.items() if followed.count(other) > alone.count(other) > 0)

    def _begin(self, turn: int, first: int) -> int | None:
        """Returns the character offset at which a turn begins: after the header that follows the previous message; None
        if it is ambiguous. `first` is the offset of the turn's own content.

        A template may begin the answer itself, with open or empty thoughts. They belong to the turn.
        """
        header = self._header(turn)
        if not header and not self.template.has_no_turn_header:
            return None
        asking = self._asking(turn)
        place = self.text.rfind(asking, 0, first) if asking else -1
        if asking and place >= 0:
            place += len(asking)
            # Some templates omit the header when asking after a tool message, but write it before the answer.
            return place + len(header) if self.text.startswith(header, place) else place
        place = self.text.rfind(header, 0, first) if header else -1
        return None if place < 0 else place + len(header)

    def _header(self, turn: int) -> str:
        """Returns the header that the template adds after the messages before a turn, or otherwise after a lone
        question."""
        before, asking = (
            (self._written(turn, add_generation_prompt) or "" for add_generation_prompt in (False, True))
            if turn
            else ("", "")
        )
        added = asking[len(before) :].partition(BEGIN_THOUGHT)[0] if asking.startswith(before) else ""
        return added or self.template.header

    def _asking(self, turn: int) -> str | None:
        """Returns the text from the previous message's content to the beginning of a turn; None if there is no previous
        message, or none of its values are rendered, as with nothing but an image."""
        text = self._written(turn, add_generation_prompt=True) if turn else None
        edges = None if text is None else self._edges(turn, turn - 1, frozenset(), add_generation_prompt=True)
        return None if text is None or edges is None else text[edges[1] :].partition(BEGIN_THOUGHT)[0]

    def _ending_alone(self, turn: int, kept: frozenset[Leaf]) -> str | None:
        """Returns the text after a turn's content if the turn ends the chat."""
        text, edges = self._written(turn + 1), self._edges(turn + 1, turn, kept)
        return None if text is None or edges is None else text[edges[1] :]

    def _ending_followed(self, turn: int) -> str | None:
        """Returns the text after a turn's content if another message follows: a tool's if the turn calls one, otherwise
        the user's. None if the template refuses that."""
        until = self.chat.until(turn + 1)
        followed = Chat([*until.messages, *_next_messages(until.messages[turn])], until.tools)
        finder = _Finder(self.template, followed)
        edges = finder._values_at(turn)
        return finder.text[edges[1] :] if edges else None

    def _num_ending(self, turn: int, alone: str, rest: str) -> int | None:
        """Returns the number of characters that end a turn after its content; None if it is ambiguous. `alone` is the
        text after the content if the turn ends the chat, `rest` that in the whole chat."""
        is_last, alone = rest == alone, self._before_opener(turn, alone)
        ends = self._after_specials(alone)
        if is_last and len(ends) > 1:  # one of them may only end chats
            ends = self._shared_ends(ends, alone, self._ending_followed(turn) or alone) or ends
        shared = ends if is_last else self._shared_ends(ends, alone, rest)
        if shared:
            return shared[-1]
        if ends:
            # The template ends the last turn with a different token from earlier ones.
            others = self._after_specials(rest)
            is_one = len(ends) == 1 and bool(others) and len(rest[: others[0]].split()) == 1
            begins_turn = bool(others) and self.template.header.startswith(rest[: others[0]].strip())
            return others[0] if is_one and not begins_turn else None
        next_mark = self._mark_of_next(alone, rest)
        if next_mark and (is_last or self.chat.messages[turn + 1]["role"] != "assistant"):
            return rest.index(next_mark, len(alone.rstrip())) + len(next_mark)
        return len(alone) if rest.startswith(alone) else None

    def _before_opener(self, turn: int, alone: str) -> str:
        """Returns the part of a chat's end that belongs to its last turn. Some templates append to every chat a block
        that begins like a message."""
        header = self._header(turn)
        opener = max((mark for mark in self.template.special_tokens if header.startswith(mark)), key=len, default="")
        return alone.partition(opener)[0] if opener else alone

    def _shared_ends(self, ends: Sequence[int], alone: str, rest: str) -> list[int]:
        """Returns the offsets after special tokens up to which both texts are equal."""
        return [end for end in ends if alone[:end] == rest[:end]]

    def _mark_of_next(self, alone: str, rest: str) -> str:
        """Returns the special token that directly follows a turn without an end token of its own; empty if there is
        none."""
        if not self.template.has_no_end_token or not rest.startswith(alone.rstrip()):
            return ""
        after = rest[len(alone.rstrip()) :].lstrip()
        marks = [mark for mark in self.template.special_tokens if after.startswith(mark)]
        return max(marks, key=len, default="")

    def _after_specials(self, text: str) -> list[int]:
        """Returns the offsets after each special token in a text."""
        found = []
        for token in self.template.special_tokens:
            place = text.find(token)
            while place >= 0:
                found.append(place + len(token))
                place = text.find(token, place + len(token))
        return sorted(found)


def _next_messages(turn: Message) -> list[Message]:
    """Returns messages that may follow a turn."""
    calls = turn.get("tool_calls")
    if not calls:
        return [QUESTION]
    names = [str(function_of(call)["name"]) for call in calls]
    links = [{"tool_call_id": call["id"]} if "id" in call else {} for call in calls]
    return [{"role": "tool", "name": name, **link, "content": PROBE} for name, link in zip(names, links, strict=True)]


class TokenOffsets:
    """Mapping from characters to tokens of a text with special tokens. Slow tokenizers have no offsets; ranges are then
    found by tokenising prefixes.

    Attributes:
        ids: token ids of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str):
        self._encode = functools.partial(tokenizer, add_special_tokens=False)
        self._text, self._offsets = text, None
        if tokenizer.is_fast:
            encoded = self._encode(text, return_offsets_mapping=True)
            self._offsets = encoded["offset_mapping"]
        else:
            encoded = self._encode(text)
        self.ids: list[int] = list(encoded["input_ids"])

    def of(self, start: int, end: int) -> Span | None:
        """Returns the range of tokens that overlap a character span; None if it is ambiguous."""
        if self._offsets is not None:
            inside = [number for number, (first, last) in enumerate(self._offsets) if first < end and last > start]
            return (inside[0], inside[-1] + 1) if inside else (0, 0)
        before, until = (list(self._encode(self._text[:place])["input_ids"]) for place in (start, end))
        are_edges = self.ids[: len(before)] == before and self.ids[: len(until)] == until
        return (len(before), len(until)) if are_edges else None
