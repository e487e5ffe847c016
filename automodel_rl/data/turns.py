"""The places of the assistant's turns in a chat that a template has written, found by changing one turn at a time.

A turn begins after what the template writes to ask for an answer, and ends with the token that ends it. This also holds
for templates that write earlier turns differently once later ones follow.
"""

from collections.abc import Sequence

from automodel_rl.data.messages import Chat
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError

MARKS_REMEDY = (
    "give data.chat_template a template that puts assistant turns between {% generation %} and {% endgeneration %}"
)
"""End of error messages about turns that cannot be found."""

Span = tuple[int, int]
"""Tokens of an assistant turn: the place of its first token, and the place after its last token."""


def find_turns(template: ChatTemplate, chat: Chat, ids: Sequence[int], turns: Sequence[int], where: str) -> list[Span]:
    """The tokens of some of the assistant's turns.

    Args:
        template: writes the chat.
        chat: the chat.
        ids: the whole chat's token ids.
        turns: places of the turns in the chat.
        where: the chat's place in the data, for error messages.

    Raises:
        InputError: a turn cannot be found in what the template writes.
    """
    text = template.text(chat) or ""
    encoded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != list(ids):
        raise InputError(
            f"{where}: the chat template's text has other tokens when it is tokenised again: {MARKS_REMEDY}"
        )
    offsets = encoded["offset_mapping"]
    found = []
    for turn in turns:
        span = _characters(template, chat, turn, text)
        if span is None:
            raise InputError(
                f"{where}: the tokens of assistant turn {turn} cannot be told from the chat template's output: "
                f"{MARKS_REMEDY}"
            )
        found.append(_tokens(offsets, *span))
    return found


def _characters(template: ChatTemplate, chat: Chat, turn: int, text: str) -> Span | None:
    """The first character of a turn and the one after its end; None if they are unclear."""
    edges = _edges(template, chat, turn)
    if edges is None or not template.header:
        return None
    first, last = edges
    place, ending = text.rfind(template.header, 0, first), _num_ending(template, chat, turn, text[last:])
    return None if place < 0 or ending is None else (place + len(template.header), last + ending)


def _edges(template: ChatTemplate, chat: Chat, turn: int) -> Span | None:
    """The first character of what a turn itself holds and the one after it; None if the template writes none of it."""
    text, changed = template.text(chat), template.text(chat, changed_turn=turn)
    if text is None or changed is None or changed == text:
        return None
    first = _num_common(text, changed)
    return first, len(text) - _num_common(text[first:][::-1], changed[first:][::-1])


def _num_ending(template: ChatTemplate, chat: Chat, turn: int, rest: str) -> int | None:
    """Number of characters with which a turn ends: all up to its last end token or, without one, what ends the chat
    there. None if the whole chat ends the turn in another way that is unclear.

    Args:
        template, chat, turn: as for `_characters`.
        rest: what follows the turn's own characters in the whole chat.
    """
    until = chat.until(turn + 1)
    edges = _edges(template, until, turn)
    ending = (template.text(until) or "")[edges[1] :] if edges else ""
    ends = _after_specials(template, ending)
    ending = ending[: ends[-1] if ends else len(ending)]
    if rest.startswith(ending):
        return len(ending)
    # The template ends a turn before others by another token than the last one.
    others = _after_specials(template, rest)
    is_one = len(ends) == 1 and bool(others) and len(rest[: others[0]].split()) == 1
    begins_turn = bool(others) and template.header.startswith(rest[: others[0]].strip())
    return others[0] if is_one and not begins_turn else None


def _after_specials(template: ChatTemplate, text: str) -> list[int]:
    """The places after each special token in a text."""
    found = []
    for token in template.special_tokens:
        place = text.find(token)
        while place >= 0:
            found.append(place + len(token))
            place = text.find(token, place + len(token))
    return sorted(found)


def _num_common(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _tokens(offsets: Sequence[Span], start: int, end: int) -> Span:
    """The tokens with the first and the last character of a span, and all between them."""
    inside = [number for number, (first, last) in enumerate(offsets) if first < end and last > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
