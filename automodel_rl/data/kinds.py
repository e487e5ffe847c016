"""Kinds of chats, told by their roles, keys and tools: what a chat template may treat differently. Texts and lengths
make no difference."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from automodel_rl.data.messages import Chat, Message, function_of

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold the assistant's thoughts."""

BEGIN_THOUGHT, END_THOUGHT = "<think>", "</think>"
"""Marks around thoughts that are part of the content."""

THOUGHT_MARKS = re.compile(r"(<think>|\[THINK\]|<\|channel>)|(</think>|\[/THINK\]|<channel\|>)")
"""Pattern of the marks at which templates split contents: those that begin thoughts, and those that end them."""

ARGUMENTS = "arguments"
"""Key of the arguments in a call of a tool; the value is JSON or an object."""


def kind_of(chat: Chat) -> frozenset[Any]:
    """The kind of a chat: the facts about the messages of each role, which roles follow each other, and the form of the
    tools."""
    facts = {(m["role"], fact) for turn, m in enumerate(chat.messages) for fact in facts_of(chat, turn)}
    # Templates refuse some orders. They look at what precedes a message, and some at the number of messages before it.
    roles = [(m["role"], bool(m.get("tool_calls"))) for m in chat.messages]
    order = {*itertools.pairwise([None, *roles, None])}
    return frozenset([*facts, *order, *("function" in tool for tool in chat.tools)])


def facts_of(chat: Chat, turn: int) -> frozenset[Any]:
    """Facts about one message that a template may depend on: its keys, and the form of each value.

    Templates may leave out thoughts of earlier turns. So a message with thoughts has one more fact: whether it is
    before the user's last message, whether it is trained, and whether it has a text or a call besides the thoughts.

    Args:
        chat: the chat.
        turn: the message's place in the chat.
    """
    message = chat.messages[turn]
    facts: set[Any] = {(key, *form) for key, value in message.items() for form in _forms(key, value)}
    facts.add(("marks", *_marks("".join(_texts(message)))))
    if message["role"] == "assistant" and _thinks(message):
        facts.add(("thoughts", turn < chat.last_of_user, turn in chat.trained, says_more(message)))
    return frozenset(facts)


def says_more(message: Message) -> bool:
    """Whether a message has a text or a call besides its thoughts."""
    spoken = "".join(_texts(message)).rpartition(END_THOUGHT)[2]
    return bool(spoken.strip() or message.get("tool_calls"))


def says_nothing(message: Message) -> bool:
    """Whether a message is empty: it has no text, no call, no thoughts and no media."""
    content = message.get("content")
    has_media = isinstance(content, list) and any(part["type"] != "text" for part in content)
    return not (any(_texts(message)) or message.get("tool_calls") or _thinks(message) or has_media)


class TextPiece(NamedTuple):
    """A text between two marks of thoughts.

    Attributes:
        start, end: its first character, and the place after the last.
        mark: the mark after it.
        is_thought: whether the mark after it ends thoughts, and none but one that begins them is before it.
    """

    start: int
    end: int
    mark: str
    is_thought: bool


def pieces_of(text: str) -> list[TextPiece]:
    """The pieces of a text before each mark of thoughts in it, without those that are blank."""
    found, start, after_begin = [], 0, True
    for mark in THOUGHT_MARKS.finditer(text):
        if text[start : mark.start()].strip():
            found.append(TextPiece(start, mark.start(), mark[0], after_begin and mark[2] is not None))
        start, after_begin = mark.end(), mark[1] is not None
    return found


def thought_in(text: str) -> str:
    """The thoughts in a text, up to `</think>`; empty if the text has none."""
    thought, end, _ = text.partition(END_THOUGHT)
    return thought.rpartition(BEGIN_THOUGHT)[2].strip() if end else ""


def _marks(text: str) -> Iterator[Any]:
    """The marks of thoughts in a text in order, each with whether a text is before it."""
    start = 0
    for mark in THOUGHT_MARKS.finditer(text):
        yield mark[0], bool(text[start : mark.start()].strip())
        start = mark.end()


def _forms(key: str, value: Any) -> Iterator[tuple[Any, ...]]:
    yield type(value), bool(value)
    if key == "content" and isinstance(value, list):
        yield from ((part["type"], bool(part.get("text"))) for part in value)
    if key == "tool_calls" and value:
        yield (len(value) > 1,)
        for call in value:
            arguments = function_of(call).get(ARGUMENTS)
            yield "function" in call, type(arguments), bool(arguments)


def _thinks(message: Message) -> bool:
    return any(message.get(key) for key in THOUGHTS) or any(thought_in(text) for text in _texts(message))


def _texts(message: Message) -> list[str]:
    """The texts in a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part["type"] == "text"]


def with_objects(message: Message) -> Message:
    """The message with objects for the arguments of its calls, if they are JSON."""
    return _with_arguments(message, lambda value: json.loads(value) if isinstance(value, str) else value)


def with_json(message: Message) -> Message:
    """The message with JSON for the arguments of its calls, if they are objects."""
    return _with_arguments(
        message, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = function_of(call)
        function = {**function, ARGUMENTS: form(function[ARGUMENTS])} if ARGUMENTS in function else function
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}
