"""Classification of chats by features that a chat template may treat differently: roles, keys and tools, but not texts
or lengths."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from automodel_rl.data.messages import Chat, Message, function_of

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Message keys for the assistant's thoughts."""

BEGIN_THOUGHT, END_THOUGHT = "<think>", "</think>"
"""Tags around thoughts inside the content."""

THOUGHT_MARKS = re.compile(r"(<think>|\[THINK\]|<\|channel>)|(</think>|\[/THINK\]|<channel\|>)")
"""Tags at which templates split contents: group 1 opens thoughts, group 2 closes them."""

ARGUMENTS = "arguments"
"""Key of a tool call's arguments, which are JSON or an object."""


def kind_of(chat: Chat) -> frozenset[Any]:
    """Returns the kind of a chat: facts about the messages of each role, the order of roles, and the format of the
    tools."""
    facts = {(m["role"], fact) for turn, m in enumerate(chat.messages) for fact in facts_of(chat, turn)}
    # Templates refuse some orders: they look at what precedes a message, and some at the number of messages before it.
    roles = [(m["role"], bool(m.get("tool_calls"))) for m in chat.messages]
    order = {*itertools.pairwise([None, *roles, None])}
    return frozenset([*facts, *order, *("function" in tool for tool in chat.tools)])


def facts_of(chat: Chat, turn: int) -> frozenset[Any]:
    """Returns facts about the message at index `turn` that a template may depend on: its keys, and the form of each
    value.

    Templates may drop thoughts of earlier turns. A message with thoughts therefore has one more fact: whether it
    precedes the user's last message, whether it is trained, and whether it has a text or a call besides the thoughts.
    """
    message = chat.messages[turn]
    facts: set[Any] = {(key, *form) for key, value in message.items() for form in _forms(key, value)}
    facts.add(("marks", *_marks("".join(_texts(message)))))
    if message["role"] == "assistant" and _thinks(message):
        facts.add(("thoughts", turn < chat.last_of_user, turn in chat.trained, has_text_or_calls(message)))
    return frozenset(facts)


def has_text_or_calls(message: Message) -> bool:
    """Whether a message has a text or a call besides its thoughts."""
    spoken = "".join(_texts(message)).rpartition(END_THOUGHT)[2]
    return bool(spoken.strip() or message.get("tool_calls"))


def is_empty_message(message: Message) -> bool:
    """Whether a message has no text, call, thoughts or media."""
    content = message.get("content")
    has_media = isinstance(content, list) and any(part["type"] != "text" for part in content)
    return not (any(_texts(message)) or message.get("tool_calls") or _thinks(message) or has_media)


class TextPiece(NamedTuple):
    """A stretch of text that precedes a thought tag.

    Attributes:
        start, end: character range, end exclusive.
        mark: the tag after it.
        is_thought: whether it is the inside of a thought: the tag after it closes thoughts, and the tag before it, if
            any, opens them.
    """

    start: int
    end: int
    mark: str
    is_thought: bool


def pieces_of(text: str) -> list[TextPiece]:
    """Returns the non-blank pieces of a text before each of its thought tags."""
    found, start, after_begin = [], 0, True
    for mark in THOUGHT_MARKS.finditer(text):
        if text[start : mark.start()].strip():
            found.append(TextPiece(start, mark.start(), mark[0], after_begin and mark[2] is not None))
        start, after_begin = mark.end(), mark[1] is not None
    return found


def thought_in(text: str) -> str:
    """Returns the thoughts in a text, up to `</think>`; empty if there are none."""
    thought, end, _ = text.partition(END_THOUGHT)
    return thought.rpartition(BEGIN_THOUGHT)[2].strip() if end else ""


def _marks(text: str) -> Iterator[Any]:
    """Yields the thought tags in a text, each with whether text precedes it."""
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
    """Returns the texts in a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part["type"] == "text"]


def with_objects(message: Message) -> Message:
    """Converts JSON arguments of a message's calls to objects."""
    return _with_arguments(message, lambda value: json.loads(value) if isinstance(value, str) else value)


def with_json(message: Message) -> Message:
    """Converts object arguments of a message's calls to JSON."""
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
