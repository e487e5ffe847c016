"""Kinds of chats: what chat templates may treat in ways of their own. Texts and lengths make no kind."""

from collections.abc import Iterator
from typing import Any

from automodel_rl.data.messages import Chat, Message, function_of

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of what the assistant thinks before it speaks."""

BEGIN_THOUGHT, END_THOUGHT = "<think>", "</think>"
"""Around thoughts that are part of the content."""

ARGUMENTS = "arguments"
"""Key of what a tool is called with: JSON or an object."""


def kind_of(chat: Chat) -> frozenset[Any]:
    """Of every role what its messages have, and of the tools their form."""
    facts = {(m["role"], fact) for turn, m in enumerate(chat.messages) for fact in facts_of(chat, turn)}
    return frozenset([*facts, *("function" in tool for tool in chat.tools)])


def facts_of(chat: Chat, turn: int) -> frozenset[Any]:
    """Of a message its keys and the forms of their values; of thoughts, which templates may forget, also where they
    are, if they are trained, and if something is said or called after them."""
    message = chat.messages[turn]
    facts = {(key, *form) for key, value in message.items() for form in _forms(key, value)}
    if message["role"] == "assistant" and _thinks(message):
        facts.add(("thoughts", turn < chat.last_of_user, turn in chat.trained, says_more(message)))
    return frozenset(facts)


def says_more(message: Message) -> bool:
    """Whether a message has more than thoughts."""
    spoken = "".join(_texts(message)).rpartition(END_THOUGHT)[2]
    return bool(spoken.strip() or message.get("tool_calls"))


def thought_in(text: str) -> str:
    """What is thought in a text of a content, if it says so."""
    thought, end, _ = text.partition(END_THOUGHT)
    return thought.rpartition(BEGIN_THOUGHT)[2].strip() if end else ""


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
    """Of a content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part["type"] == "text"]
