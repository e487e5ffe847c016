"""Turns in the format of the model's chat template: parses them, and writes the messages after them."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from automodel_rl.chat_api.values import check_depth
from automodel_rl.data.messages import Chat
from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import Format, read_turn
from automodel_rl.data.turn_suffix import TurnSuffix
from automodel_rl.rollout.episodes.protocol import Message, Turn

HEADER_TOKENS = 64
"""Upper bound of the tokens of a turn's header and of what the template writes of the turn."""

BREAK = "\u200b"
"""Zero-width space that keeps text of an answer from being read as a special token."""

CUT = " ... "


class ChatTurns:
    """`TurnCodec` for conversations with tools, an environment or an agent.

    Args:
        form: the format of turns with calls; None for plain text.
        most_tokens: limit of an answer, which is cut in the middle; None for no limit.
        what: name of the messages, for errors.

    Raises:
        InputError: the template drops calls.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[dict[str, Any]],
        form: Format | None,
        most_tokens: int | None = None,
        what: str = "the environment's first messages",
    ):
        self.template, self.tokenizer = template, template.tokenizer
        self.tools = tuple(self._without_marks(tool) for tool in tools)
        self.most_tokens, self.what, self._form = most_tokens, what, form
        self._suffix = TurnSuffix(template, self.tools)

    @functools.cached_property
    def stop_ids(self) -> set[int]:
        """Tokens with which the template ends turns. Raises InputError if turns with calls do not end with one."""
        return self._suffix.stop_ids()

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        chat = Chat([self._harmless(message) for message in messages], self.tools)
        return self.template.encode(chat, self.what, add_generation_prompt=True)["input_ids"]

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Turn:
        plain = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        if self._form is None:
            return Turn(plain, plain)
        before, text = (str(self.tokenizer.decode(ids)) for ids in (prompt_ids[-HEADER_TOKENS:], token_ids))
        header = self.template.header
        begun = before[before.rfind(header) :] if header in before else header
        try:
            message = read_turn(self.tokenizer, self._form, begun, text, self.tools)
            calls = tuple(_checked(call["function"]) for call in message.get("tool_calls") or [])
        except Exception as error:  # a model's text may break any parser
            return Turn(plain, plain, problem=f"the call cannot be read: {' '.join(str(error).split())[:200]}")
        if calls and not self.tools:  # without tools this is plain text
            return Turn(plain, plain)
        thoughts = str(message.get("reasoning_content") or "")
        return Turn(plain, str(message.get("content") or ""), calls, reasoning=thoughts)

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        called = [str(call["name"]) for call in turn.calls] if messages[0]["role"] == "tool" else []
        short = [{**message, "content": self._cut(message["content"])} for message in messages]
        return self._suffix([self._harmless(message) for message in short], called, stop)

    def _harmless(self, message: Message) -> Message:
        """Escapes special tokens in the texts of a message, which would end or begin a turn. Media are unchanged."""
        return {key: self._without_marks(value) for key, value in message.items()}

    def _without_marks(self, value: Any) -> Any:
        """Breaks all special tokens in the texts of a JSON value, at any depth."""
        if isinstance(value, str):
            for mark in self.template.special_tokens:
                value = value.replace(mark, mark[:1] + BREAK + mark[1:])
            return value
        if isinstance(value, dict):
            return {self._without_marks(key): self._without_marks(inner) for key, inner in value.items()}
        return [self._without_marks(inner) for inner in value] if isinstance(value, list) else value

    def _cut(self, text: str) -> str:
        if self.most_tokens is None or len(text) <= self.most_tokens:  # a token has at least one character
            return text
        # Very long texts are cut by characters first, to avoid tokenising all of them.
        half = 16 * self.most_tokens
        text = text if len(text) <= 2 * half else text[:half] + CUT + text[-half:]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= self.most_tokens:
            return text
        kept = max(1, self.most_tokens // 2)
        return f"{self.tokenizer.decode(ids[:kept])}{CUT}{self.tokenizer.decode(ids[-kept:])}"


def _checked(function: Any) -> dict[str, Any]:
    """Checks a call. Raises ValueError or InputError if name or arguments are missing, or nested too deep."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
        raise ValueError(f"expected an object with name and arguments, got {function!r:.80}")
    check_depth(function["arguments"], "its arguments")
    json.dumps(function["arguments"], allow_nan=False)  # must be JSON, to be sent on
    return {"name": function["name"], "arguments": function["arguments"]}
