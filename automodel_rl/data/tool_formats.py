"""Formats in which models write tool calls, and parsing of calls from a turn's text.

A format is a response template of transformers (`PreTrainedTokenizerBase.parse_response`, from 5.13 on). A tokenizer's
own response template takes precedence. Most published tokenizers have none; the format is then derived from the chat
template's output.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.data.messages import Chat, Message
from automodel_rl.data.template import PROBE, ChatTemplate
from automodel_rl.errors import InputError

Format = dict[str, Any]

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What to look up."},
                "count": {"type": "integer", "description": "Most results."},
            },
            "required": ["text", "count"],
        },
    },
}

PROBE_ARGUMENTS = {"text": f"a {PROBE}, 12", "count": 3}


def _format(thought: str, calls: Format, end: str) -> Format:
    """Returns a format with tagged thoughts, any number of calls, and a text that ends with a token."""
    fields: Format = {"tool_calls": {"repeats": True, "transform": _NAMED, **calls}}
    if thought:
        fields["reasoning_content"] = {"open": f"<{thought}>", "close": f"</{thought}>", "content": "text"}
    fields["content"] = {"close_pattern": rf"(?:{end})\s*|$", "content": "text"}
    return {"defaults": {"role": "assistant"}, "fields": fields}


_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TEXT_VALUES = {"name": "text"}

FORMATS: dict[str, Format] = {
    "hermes": _format(
        "think",
        {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        r"<\|im_end\|>",
    ),
    "xml": _format(
        "think",
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
                "value_parser": _TEXT_VALUES,
            },
        },
        r"<\|im_end\|>",
    ),
    "glm": _format(
        "think",
        {
            "open_pattern": r"<tool_call>(?P<name>[^\s<]+)\s*",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": _TEXT_VALUES,
            },
        },
        r"<\|observation\|>|<\|user\|>",
    ),
    "llama3": _format(
        "",
        {
            "open_pattern": r'\{\s*"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}\s*(?=<\|eot_id\|>|<\|eom_id\|>|$)",
            "content": "json",
        },
        r"<\|eot_id\|>|<\|eom_id\|>",
    ),
    "gpt_oss": {
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning_content": {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r"to=functions\.(?P<name>[^\s<]+)[^{]*<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"<\|return\|>|<\|end\|>",
                "content": "text",
            },
        },
    },
}
"""Formats by name. hermes: JSON between tags (Qwen2.5, Qwen3, Hermes). xml: one tag per argument (Qwen3.5, Nemotron-3).
glm: pairs of tags (GLM-4.5 on). llama3: bare JSON (Llama 3.1 on). gpt_oss: harmony's channels."""


def read_turn(
    tokenizer: PreTrainedTokenizerBase, form: Format, opening: str, text: str, tools: Sequence[dict[str, Any]]
) -> Message:
    """Parses an assistant turn into a message, with `tool_calls` if it has any.

    Args:
        tokenizer: the model's tokenizer.
        form: the format.
        opening: end of the prompt from the turn's header on, which may include the start of a thought.
        text: text of the turn, special tokens included.
        tools: JSON schemas that determine the types of argument values.

    Raises:
        ValueError: a call in the text is malformed.
    """
    return tokenizer.parse_response(text, form, prefix=opening, tools=list(tools))


def find_format(template: ChatTemplate) -> Format:
    """Returns the format in which the chat template renders calls, verified by a round trip. Raises InputError if there
    is none."""
    tokenizer = template.tokenizer
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": PROBE_ARGUMENTS}}
    question: Message = {"role": "user", "content": PROBE}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = template.text_with_generation_prompt(Chat([question], (PROBE_TOOL,)))
    text = template.text(Chat([question, turn], (PROBE_TOOL,))) or ""
    if "look_up" not in text[len(before) :]:
        raise InputError("the chat template omits tool calls: set one that writes them in data.chat_template")
    own = tokenizer.response_template
    header = template.header
    written = text[text.rindex(header) + len(header) :] if header and header in text else text[len(before) :]
    for form in [own] if own else [{**form, "start_anchor": header} for form in FORMATS.values()]:
        try:
            found = read_turn(tokenizer, form, header, written, [PROBE_TOOL])
        except Exception:  # another family's format
            continue
        functions = [call["function"] for call in found.get("tool_calls") or []]
        if functions == [{"name": "look_up", "arguments": PROBE_ARGUMENTS}]:
            return form
    raise InputError(
        "the chat template writes tool calls in an unknown format (known are hermes, xml, glm, llama3 and gpt_oss): "
        f"add a response_template to the tokenizer. It writes: {' '.join(written.split())[:160]}"
    )
