"""Calls of tools are read as templates write them; what is no call, or is malformed, is told."""

import pytest

from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import FORMATS, PROBE_TOOL, find_format, read_turn
from automodel_rl.errors import InputError
from tests.unit.data.stock_templates import SILENT, stock_tokenizer

KNOWN = {
    "hermes": ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
    "xml": ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super"),
    "glm": ("glm4moe",),
    "llama3": ("llama3_1", "llama3_2"),
    "gpt_oss": ("gptoss",),
}


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, names in KNOWN.items() for name in names])
def test_the_format_of_a_template_is_found_by_reading_back_what_it_writes(form: str, name: str) -> None:
    found = find_format(ChatTemplate(stock_tokenizer(name)))
    assert found["fields"] == FORMATS[form]["fields"]


@pytest.mark.parametrize("name", SILENT)
def test_templates_without_calls_have_no_format(name: str) -> None:
    with pytest.raises(InputError, match="the chat template (omits tool calls|refuses a message)"):
        find_format(ChatTemplate(stock_tokenizer(name)))


def test_a_call_within_a_thought_is_none() -> None:
    template = ChatTemplate(stock_tokenizer("qwen3"))
    form = find_format(template)
    call = '<tool_call>\n{"name": "look_up", "arguments": {"text": "7", "count": 7}}\n</tool_call>'
    text = f"<think>\nPerhaps {call}\n</think>\n\nIt is 7.<|im_end|>"
    assert "tool_calls" not in read_turn(template.tokenizer, form, template.header, text, [PROBE_TOOL])
    turn = read_turn(
        template.tokenizer, form, template.header, f"<think>\nHm.\n</think>\n\n{call}<|im_end|>", [PROBE_TOOL]
    )
    assert [one["function"]["arguments"] for one in turn["tool_calls"]] == [{"text": "7", "count": 7}]
