"""Text that a chat template writes between two turns of the assistant.

A multi-turn conversation is never tokenised again. The next prompt is

    the last prompt + the turn as it was sampled + the suffix: the template's text for the messages that follow it

because decoding and re-encoding sampled tokens may change them, and templates later render earlier turns differently.
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
    """Computes the tokens between two turns. `tools` are JSON schemas.

    The template renders a short conversation that contains a known turn followed by the new messages. The suffix is the
    text after the token that ends the turn.
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[dict[str, Any]] = ()):
        self.template, self.tools = template, tuple(tools)
        self.tokenizer = template.tokenizer

    def __call__(self, messages: Sequence[Message], called: Sequence[str], stop: int) -> list[int]:
        """Returns the suffix for messages that follow a turn, including the header of the assistant's next turn.

        Args:
            messages: one tool message per call, or other messages.
            called: names of the tools that the turn called, in order.
            stop: the token that ended the turn.

        Raises:
            InputError: the template does not render tool calls, or ends the turn with another token.
        """
        chat = Chat([QUESTION, probe_turn(called), *messages], self.tools)
        text = self.template.text_with_generation_prompt(chat)
        mark = self.tokenizer.convert_ids_to_tokens(stop)
        if PROBE not in text:
            raise InputError("the chat template omits tool calls: set one that writes them in data.chat_template")
        tail = text[text.rindex(PROBE) + len(PROBE) :]
        if mark not in tail and mark in turn_stop_tokens(self.template, self.tools):
            mark = end_token(self.template, chat, 1) or mark  # the end token may differ once messages follow
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
        """Returns the tokens with which the template ends turns, at which the generator must stop. Raises InputError if
        it ends turns with calls differently."""
        ends = turn_stop_tokens(self.template, self.tools)
        if self.tools and not ends[-1]:
            raise InputError(
                "the chat template does not end turns that call tools with a special token: set another one in "
                "data.chat_template"
            )
        return {self.tokenizer.convert_tokens_to_ids(end) for end in ends if end}


def turn_stop_tokens(template: ChatTemplate, tools: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the special tokens with which a template ends an assistant turn without calls and, if there are tools,
    one with a call; empty if there is none."""
    calls = [str(tool["function"]["name"]) for tool in tools[:1]]
    turns = [((), ()), *([(calls, tuple(tools))] if calls else [])]
    return [end_token(template, Chat([QUESTION, probe_turn(called)], given), 1) for called, given in turns]


def probe_turn(called: Sequence[str]) -> Message:
    """Returns a turn that ends with a text that occurs in no template."""
    if not called:
        return {"role": "assistant", "content": PROBE}
    calls = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": {"text": PROBE}}}
        for number, name in enumerate(called)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
