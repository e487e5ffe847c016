"""The tokens that end what a model writes: the one place that knows them, for generators and exports.

A checkpoint names them in up to four places that often differ: config.json, generation_config.json, the tokenizer, and
the chat template, which ends the assistant's turns with a token of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.data.messages import Chat, Message
from automodel_rl.data.template import PROBE, ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL
from automodel_rl.data.turn_suffix import ANSWER, QUESTION, probe_turn
from automodel_rl.hf.generation import GENERATION, config_ends, generation_ends

OPEN = (
    "warning: the chat template ends the assistant's turns with no token of the tokenizer, so what the model writes "
    "may not end: give data.chat_template another, or add the token to the tokenizer"
)
"""The line about a template without an end."""

TOOL = str(PROBE_TOOL["function"]["name"])


def completion_ends(
    source: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> set[int]:
    """Ids of the tokens that end a completion.

    Args:
        source: the checkpoint's folder.
        config: the config of the whole model.
        tokenizer: the model's tokenizer.
        variables: further variables for the chat template.

    Raises:
        InputError: generation_config.json is damaged.
    """
    return {*config_ends(config), *generation_ends(source, config), *_taught(tokenizer, variables)}


@dataclass(frozen=True)
class NewEnds:
    """What training teaches about ends and the checkpoint's generation_config.json does not say.

    Attributes:
        ids: tokens that end what the trained model writes, at which generation with the checkpoint's settings does not
            stop.
        note: a line about them for the user; empty if there is nothing to say.
    """

    ids: tuple[int, ...]
    note: str


def new_ends(
    source: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
    *,
    adapters: bool = False,
) -> NewEnds:
    """The ends that an export has to add to generation_config.json, with the arguments of `completion_ends`.

    Args:
        adapters: whether only adapters are exported, which have no generation_config.json of their own.
    """
    known = generation_ends(source, config)
    ids = tuple(end for end in _taught(tokenizer, variables) if end not in known)
    if not ids:
        is_open = tokenizer.chat_template is not None and not template_ends(
            ChatTemplate(tokenizer, variables=variables)
        )
        return NewEnds((), OPEN if is_open else "")
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ids)
    if not adapters:
        return NewEnds(ids, f"{GENERATION} also stops at {named}, which ends what was trained")
    note = (
        f"warning: {GENERATION} of {source} does not stop at {named}, which ends what was trained: let generation with "
        "these adapters stop there, or merge them (automodel-rl export --merge), which writes it"
    )
    return NewEnds(ids, note)


def _taught(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None) -> list[int]:
    """The ends of what is trained: texts end with the tokenizer's end token, turns as the chat template ends them."""
    of_texts = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template is None:
        return of_texts
    return [*dict.fromkeys([*of_texts, *template_ends(ChatTemplate(tokenizer, variables=variables))])]


def template_ends(template: ChatTemplate) -> list[int]:
    """Ids of the tokens with which a chat template ends the assistant's turns; empty if it ends them with no token.

    A turn ends with the special token after its text; if the chat ends there and several stand together, with their
    last. Some templates write none; there the mark of the next role ends the turn (GLM). A turn that calls tools may
    end with a token of its own: the last special token of a chat that ends with the turn, unless the token also stands
    between two calls of a turn.
    """
    ends = _end_of_turn(template)
    calling = _tail(template, [QUESTION, probe_turn([TOOL])])
    of_calls = _marks(calling, template.special_tokens)
    if not {*ends} & {*of_calls}:
        answered = _tail(template, [QUESTION, probe_turn([TOOL]), {**ANSWER, "name": TOOL}])
        found = of_calls[-1:] or _marks(answered, template.special_tokens)[:1]
        ends += [mark for mark in found if mark not in _between_calls(template)]
    return [template.tokenizer.convert_tokens_to_ids(mark) for mark in ends]


def _end_of_turn(template: ChatTemplate) -> list[str]:
    """The token that ends a turn without calls; empty if there is none."""
    kinds = (template.special_tokens, tuple(template.tokenizer.get_added_vocab()))  # others if none is special
    closed = _tail(template, [QUESTION, probe_turn(())])
    for tokens in kinds:
        marks = _marks(closed, tokens)
        while marks[1:] and marks[0] + marks[1] in closed:
            marks = marks[1:]
        if marks:
            return marks[:1]
    followed = _tail(template, [QUESTION, probe_turn(()), QUESTION])
    marks = [mark for tokens in kinds for mark in _marks(followed, tokens) if followed.lstrip().startswith(mark)]
    return marks[:1]


def _text(template: ChatTemplate, messages: list[Message]) -> str:
    calls = any("tool_calls" in message for message in messages)
    return template.text(Chat(messages, (PROBE_TOOL,) if calls else ())) or ""


def _tail(template: ChatTemplate, messages: list[Message]) -> str:
    """What the template writes after the last text of the assistant; empty if it refuses the chat."""
    _, probe, tail = _text(template, messages).rpartition(PROBE)
    return tail if probe else ""


def _between_calls(template: ChatTemplate) -> str:
    """What the template writes between the arguments of two calls of a turn."""
    pieces = _text(template, [QUESTION, probe_turn([TOOL, TOOL])]).split(PROBE)
    return PROBE.join(pieces[1:-1])


def _marks(text: str, tokens: Sequence[str]) -> list[str]:
    """The tokens that stand in a text, in their order there."""
    return sorted((token for token in tokens if token and token in text), key=text.index)
