"""Turns as the model's chat template writes them: reads what the model wrote, and writes what comes after it."""

from collections.abc import Sequence
from typing import Any

from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import find_format, read_turn
from automodel_rl.data.turn_suffix import TurnSuffix
from automodel_rl.rollout.episodes.protocol import Message, Turn

HEADER_TOKENS = 64
"""Most tokens of a turn's header, and of what the template writes of the turn itself."""

BREAK = "\u200b"
"""A break without width. It keeps an answer's text from being read as a special token."""


class ChatTurns:
    """A `TurnCodec` for conversations with tools.

    Args:
        template: the chat template.
        tools: JSON schemas of the tools.

    Raises:
        InputError: the template leaves out calls, or writes them in a format that is not known.
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[dict[str, Any]]):
        self.template, self.tools, self.tokenizer = template, list(tools), template.tokenizer
        self.form, self._suffix = find_format(template), TurnSuffix(template, tools)

    def read(self, opening: Sequence[int], token_ids: Sequence[int]) -> Turn:
        before, text = (str(self.tokenizer.decode(ids)) for ids in (opening[-HEADER_TOKENS:], token_ids))
        plain = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        header = (
            before[before.rfind(self.template.header) :] if self.template.header in before else self.template.header
        )
        try:
            message = read_turn(self.tokenizer, self.form, header, text, self.tools)
        except ValueError as error:
            return Turn(plain, problem=f"the call cannot be read: {' '.join(str(error).split())[:200]}")
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return Turn(plain, tuple({"name": call["name"], "arguments": call["arguments"]} for call in calls))

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        called = [str(call["name"]) for call in turn.calls] if messages[0]["role"] == "tool" else []
        return self._suffix([self._harmless(message) for message in messages], called, stop)

    def _harmless(self, message: Message) -> Message:
        """The message without special tokens in its text, which would end a turn or begin one."""
        content = message["content"]
        for mark in self.template.special_tokens:
            content = content.replace(mark, mark[:1] + BREAK + mark[1:])
        return {**message, "content": content}
