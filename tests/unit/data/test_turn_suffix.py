"""What templates write between turns: the same as in the whole conversation, after the token that ended the turn."""

from typing import Any

import pytest

from automodel_rl.data.messages import Chat
from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL
from automodel_rl.data.turn_suffix import TurnSuffix
from automodel_rl.errors import InputError
from tests.unit.data.stock_templates import CALLING, SILENT, stock_tokenizer


def conversation(num_calls: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation up to a turn with calls, and the tools' messages."""
    ids = [f"{number}23456789" for number in range(num_calls)]
    calls = [
        {"id": one, "type": "function", "function": {"name": "look_up", "arguments": {"text": "Ben", "count": 3}}}
        for one in ids
    ]
    turn = {"role": "assistant", "content": "", "reasoning_content": "I should look.", "tool_calls": calls}
    answers = [{"role": "tool", "name": "look_up", "tool_call_id": one, "content": f"{one[0]} coins"} for one in ids]
    return [{"role": "user", "content": "How many?"}, turn], answers


ONE_CALL = ("llama3_1", "llama3_2", "gptoss")
"""Templates that write one call a turn."""


@pytest.mark.parametrize(
    ("name", "num_calls"), [(name, count) for name in CALLING for count in (1, 2) if count == 1 or name not in ONE_CALL]
)
def test_the_suffix_is_that_of_the_whole_conversation(name: str, num_calls: int) -> None:
    tokenizer = stock_tokenizer(name)
    template = ChatTemplate(tokenizer)
    before, answers = conversation(num_calls)
    text = template.text_with_generation_prompt(Chat([*before, *answers], (PROBE_TOOL,)))
    tail = text[text.rindex("Ben") :]
    stop = min((mark for mark in tokenizer.all_special_tokens if mark in tail), key=tail.index)
    suffix = TurnSuffix(template, [PROBE_TOOL])(answers, ["look_up"] * num_calls, tokenizer.convert_tokens_to_ids(stop))
    assert tokenizer.decode(suffix) == tail[tail.index(stop) + len(stop) :]


@pytest.mark.parametrize("name", SILENT)
def test_templates_that_leave_calls_out_are_refused(name: str) -> None:
    tokenizer = stock_tokenizer(name)
    suffix = TurnSuffix(ChatTemplate(tokenizer), [PROBE_TOOL])
    with pytest.raises(InputError, match="the chat template (omits tool calls|refuses a message of tool)"):
        suffix(conversation(1)[1], ["look_up"], 0)
