"""What a chat template writes between two turns of the assistant.

A conversation of several turns is never tokenised again. The next prompt is

    the last prompt + the turn as it was sampled + the suffix: what the template writes for the messages that follow it

for decoding and encoding sampled tokens gives other tokens, and templates write earlier turns differently later.
"""

from collections.abc import Sequence
from typing import Any

from automodel_rl.data.messages import Chat, Message
from automodel_rl.data.template import PROBE, ChatTemplate
from automodel_rl.data.turns import end_token
from automodel_rl.errors import InputError

QUESTION: Message = {"role": "user", "content": "Go on."}
ANSWER: Message = {"role": "tool", "content": "Done."}


class TurnSuffix:
    """Writes the tokens between two turns.

    The template writes a short conversation with a turn in it whose end is known, and the new messages after it. The
    suffix is what follows the token that ends the turn.

    Args:
        template: the chat template.
        tools: JSON schemas of the tools that the assistant may call.
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[dict[str, Any]] = ()):
        self.template, self.tools = template, tuple(tools)
        self.tokenizer = template.tokenizer

    def __call__(self, messages: Sequence[Message], called: Sequence[str], stop: int) -> list[int]:
        """The suffix for messages that follow a turn, up to the place where the assistant's next turn begins.

        Args:
            messages: the messages: one of a tool for each call, or others.
            called: names of the tools that the turn called, in order; empty if it called none.
            stop: the token that ended the turn.

        Raises:
            InputError: the template does not write tool calls, or writes another token at the end of a turn.
        """
        chat = Chat([QUESTION, probe_turn(called), *messages], self.tools)
        text = self.template.opening_text(chat)
        mark = self.tokenizer.convert_ids_to_tokens(stop)
        if PROBE not in text:
            raise InputError(
                "the chat template leaves out calls of tools: give one that writes them in data.chat_template"
            )
        tail = text[text.rindex(PROBE) + len(PROBE) :]
        if mark not in tail and mark in turn_ends(self.template, self.tools):
            mark = end_token(self.template, chat, 1) or mark  # another one stands there once messages follow
        if mark not in tail:
            raise InputError(
                f"the turn ended with {mark!r}, which the chat template does not write between this turn and a message "
                f"of {messages[0]['role']}"
            )
        first, *suffix = self.tokenizer(tail[tail.index(mark) :], add_special_tokens=False)["input_ids"]
        if first != self.tokenizer.convert_tokens_to_ids(mark):
            raise InputError(f"the tokenizer reads {mark!r}, which ends turns, as several tokens")
        return suffix

    def stop_ids(self) -> set[int]:
        """The tokens with which the template ends turns. The generator has to stop at them.

        Raises:
            InputError: the template leaves out calls of tools, or ends turns that call tools with no special token.
        """
        ends = turn_ends(self.template, self.tools)
        if self.tools and not ends[-1]:
            raise InputError(
                "the chat template does not end turns that call tools with a special token: give another one in "
                "data.chat_template"
            )
        return {self.tokenizer.convert_tokens_to_ids(end) for end in ends if end}


def turn_ends(template: ChatTemplate, tools: Sequence[dict[str, Any]]) -> list[str]:
    """The special tokens with which a template ends the assistant's turns: a turn without calls, and one that calls a
    tool if there are some. One is empty if the template ends such turns with no special token.

    Args:
        template: the chat template.
        tools: JSON schemas of the tools that the assistant may call.
    """
    calls = [str(tool["function"]["name"]) for tool in tools[:1]]
    turns = [((), ()), *([(calls, tuple(tools))] if calls else [])]
    return [end_token(template, Chat([QUESTION, probe_turn(called)], given), 1) for called, given in turns]


def probe_turn(called: Sequence[str]) -> Message:
    """A turn with a text that no template contains at its end."""
    if not called:
        return {"role": "assistant", "content": PROBE}
    calls = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": {"text": PROBE}}}
        for number, name in enumerate(called)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
